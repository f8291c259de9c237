"""`crossgrain export` says what is wrong before it loads a model; `tests/clients` has the rest."""

from typer.testing import CliRunner

from crossgrain_command.app import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["export", *arguments])
    return result.exit_code, result.output


def test_a_recipe_is_needed_unless_nothing_is_quantized(tmp_path):
    code, printed = run(str(tmp_path / "out"), "--hf", str(tmp_path))
    assert code == 2 and "--recipe is needed" in printed


def test_mistakes_of_arguments(tmp_path):
    code, printed = run(str(tmp_path / "out"), "--hf", str(tmp_path), "--recipe", "nvfp5")
    assert code == 2 and "did you mean" in printed
    code, printed = run(str(tmp_path / "out"), "--hf", str(tmp_path), "-r", "nvfp4", "--dtype", "int8")
    assert code == 2 and "--dtype must be one of bfloat16, float16, float32, got int8" in printed
    assert not (tmp_path / "out").exists()
