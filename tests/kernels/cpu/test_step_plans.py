"""Plans of half steps: planes, operands and products have the bits that they have one after the other."""

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.kernels import HalfStep, Make, ProductOf, Target
from crossgrain.kernels.cpu import products, step_plans
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.cpu.step_plans import StepPlan
from crossgrain.planes import Plane, empty_plane

from ...common.encodings import SEED, encoded, encodings_of

CPU, REFERENCE = CpuBackend(), kernels.REFERENCE
M, K, N = 64, 160, 96
FORMATS = {  # of rows and columns
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8 2-D": ("mxfp8_2d", "mxfp8_2d"),
    "mxfp4, stochastic": ("mxfp4_sr", "mxfp4_sr"),
    "mxfp6 | nvfp4": ("mxfp6_e3m2", "nvfp4_rht_sr"),
    "mxfp8 | nvfp4, rotated and stochastic": ("mxfp8", "nvfp4_rht_sr"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4 2-D": ("nvfp4_2d", "nvfp4_2d"),
    "nvfp4 4-over-6": ("nvfp4_4over6_448", "nvfp4"),
    "nvfp4 | mxfp8": ("nvfp4", "mxfp8"),
    "fp8 blocks": ("fp8_block", "fp8_block"),
    "fp8": ("fp8", "fp8"),
}


def numbers(shape, dtype=torch.float32, seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encodings(case):
    row, column = FORMATS[case]
    return encodings_of(row, (ROWWISE,)) + encodings_of(column, (COLUMNWISE,))


def made(x, given, kept, derives=False):
    planes = [empty_plane(encoding.format, way, x.shape, device=x.device) for way, encoding in given]
    return Make(x, planes, [encoding for _, encoding in given], kept, derives)


def forward_of(x, w, case):
    ways = encodings(case)
    return HalfStep((made(x, ways, (False, True)), made(w, ways, (False, True))), (), (ProductOf(0, 2),))


def backward_of(dy, w, x, case):
    """``w`` and ``x`` are columnwise planes, in the formats of the rows and of the columns of ``dy``."""
    return HalfStep((made(dy, encodings(case), (False, False)),), (w, x), (ProductOf(0, 2), ProductOf(1, 3)))


def planes_of(x, case, backend=REFERENCE):
    return encoded(backend, x, encodings(case))


def new_plane(x, way, encoding):
    """A plane that is full of a pattern, its padding as well."""
    plane = empty_plane(encoding.format, way, x.shape, device=x.device)
    for buffer in plane.buffers():
        buffer.view(torch.uint8).fill_(0xA5)
    return plane


def product_of(running, number, total):
    """The product, by whichever way; None if the plan refuses."""
    operands = running.product(number)
    if operands is None:
        return None
    if len(operands) == 3:
        left, right, noted = operands
        return torch.mm(left, right, out=total).mul_(float(noted[0]) * float(noted[1]))
    return torch.mm(*operands, out=total) if operands else total


def expected_product(a, b):
    """As `gemm` computes it: from codes where that is possible."""
    total = torch.empty(a.operand_shape[0], b.operand_shape[0])
    if a.format.scale_rule == b.format.scale_rule == "two_level" and CPU.can_multiply(a, b):
        bound = [plane.format.element.max * plane.format.scale_bound for plane in (a, b)]
        factor = float(a.amax) * (1.0 / bound[0]) * (float(b.amax) * (1.0 / bound[1]))
        CPU.multiply(a, b, total, factor)
        return total
    if a.format.block is None:
        left, right = (CPU.decode_operand(kernels.under_scale_one(plane)) for plane in (a, b))
        return torch.mm(left, right.t(), out=total).mul_(float(a.scale) * float(b.scale))
    return torch.mm(CPU.decode_operand(a), CPU.decode_operand(b).t(), out=total)


def skip_without_plan(case):
    if "nvfp4" in case and not products.has_byte_dot_products():
        pytest.skip("this CPU does not multiply bytes: NVFP4 is decoded, without a plan")


def same_plane(found, wanted):
    codes = torch.equal(found.operand_codes(), wanted.operand_codes())
    scales = torch.equal(found.operand_scales(), wanted.operand_scales())
    return codes and scales and (found.amax is None or torch.equal(found.amax, wanted.amax))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FORMATS)
def test_forward_keeps_the_columns_and_multiplies_the_rows(case, dtype):
    skip_without_plan(case)
    for factor in (1.0, 2.0**-30):
        x, w = numbers((M, K), dtype) * factor, numbers((N, K), dtype, seed=8)
        plan = CPU.step_plan(forward_of(x, w, case))
        assert isinstance(plan, StepPlan) and plan.suits((x, w), (None, None), ())
        kept = [new_plane(each, *encodings(case)[1]) for each in (x, w)]
        total = torch.empty(M, N)
        running = plan.start((x, w), (None, None), kept, (), (SEED, SEED), (total,))
        found = product_of(running, 0, total)
        (x_row, x_column), (w_row, w_column) = planes_of(x, case), planes_of(w, case)
        assert same_plane(kept[0], x_column) and same_plane(kept[1], w_column)
        assert torch.equal(found, expected_product(x_row, w_row))


def test_the_padding_of_scales_is_zero():
    x, w = numbers((M, K)), numbers((N, K))
    plan = CPU.step_plan(forward_of(x, w, "mxfp8"))
    kept = [new_plane(each, *encodings("mxfp8")[1]) for each in (x, w)]
    plan.start((x, w), (None, None), kept, (), (None, None), (torch.empty(M, N),)).product(0)
    for plane in kept:
        stored, inside = plane.scale.clone(), plane.operand_scales().t().shape
        assert stored.shape != inside
        stored[: inside[0], : inside[1]] = 0
        assert not stored.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FORMATS)
def test_backward_multiplies_both_planes_of_the_gradient(case, dtype):
    skip_without_plan(case)
    dy = numbers((M, N), dtype)
    for_dgrad, for_wgrad = (encodings_of(name, (COLUMNWISE,)) for name in FORMATS[case])
    (w,), (x,) = encoded(CPU, numbers((N, K)), for_dgrad), encoded(CPU, numbers((M, K)), for_wgrad)
    plan = CPU.step_plan(backward_of(dy, w, x, case))
    assert isinstance(plan, StepPlan) and plan.suits((dy,), (None,), (w, x))
    totals = torch.empty(M, K), torch.empty(N, K)
    running = plan.start((dy,), (None,), (), (w, x), (SEED,), totals)
    found = [product_of(running, number, total).clone() for number, total in enumerate(totals)]
    dy_row, dy_column = planes_of(dy, case)
    assert torch.equal(found[0], expected_product(dy_row, w))
    assert torch.equal(found[1], expected_product(dy_column, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["mxfp8", "mxfp4, stochastic", "mxfp8 | nvfp4, rotated and stochastic"])
def test_columns_can_be_made_of_the_decoded_rows(case, dtype):
    x, w, ways = numbers((M, K), dtype), numbers((N, K), dtype, seed=8) * 2.0**-120, encodings(case)
    makes = made(x, ways, (False, True)), made(w, ways, (False, True), derives=True)
    plan = CPU.step_plan(HalfStep(makes, (), (ProductOf(0, 2),)))
    kept, total = [new_plane(each, *ways[1]) for each in (x, w)], torch.empty(M, N)
    found = product_of(plan.start((x, w), (None, None), kept, (), (SEED, SEED), (total,)), 0, total)
    rows = encoded(REFERENCE, w, ways[:1])[0]
    assert same_plane(kept[1], encoded(REFERENCE, REFERENCE.decode(rows, dtype), ways[1:])[0])
    assert torch.equal(found, expected_product(planes_of(x, case)[0], rows))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", FORMATS)
def test_a_number_that_is_not_finite_is_refused(case, bad):
    skip_without_plan(case)
    x, w = numbers((M, K)), numbers((N, K))
    plan, total = CPU.step_plan(forward_of(x, w, case)), torch.empty(M, N)
    kept = [new_plane(each, *encodings(case)[1]) for each in (x, w)]
    for matrix in (x, w):
        held = matrix.clone()
        matrix[33, 5] = bad
        assert plan.start((x, w), (None, None), kept, (), (SEED, SEED), (total,)).product(0) is None
        matrix.copy_(held)
        assert plan.start((x, w), (None, None), kept, (), (SEED, SEED), (total,)).product(0) is not None


@pytest.mark.skipif(not products.has_byte_dot_products(), reason="this CPU does not multiply bytes")
def test_global_scales_whose_product_is_beyond_fp32_are_refused():
    x, w = numbers((M, K)) * 2.0**100, numbers((N, K)) * 2.0**100
    plan, total = CPU.step_plan(forward_of(x, w, "nvfp4")), torch.empty(M, N)
    kept = [new_plane(each, *encodings("nvfp4")[1]) for each in (x, w)]
    assert plan.start((x, w), (None, None), kept, (), (None, None), (total,)).product(0) is None
    assert plan.start((x, w * 2.0**-100), (None, None), kept, (), (None, None), (total,)).product(0) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_buffer_may_serve_both_directions(dtype):
    """Per-tensor FP8: the two planes of a matrix are one, which is written once and has one address."""

    def both(x, kept):
        (plane,) = made(x, encodings("fp8")[:1], kept).planes
        encoding = encodings("fp8")[0][1]
        return Make(x, [plane, plane.read(COLUMNWISE)], [encoding, encoding], kept)

    x, w, dy = numbers((M, K), dtype), numbers((N, K), dtype, seed=8) * 5, numbers((M, N), dtype, seed=9)
    plan = CPU.step_plan(HalfStep((both(x, (False, True)), both(w, (False, True))), (), (ProductOf(0, 2),)))
    kept = [new_plane(each, *encodings("fp8")[0]).read(COLUMNWISE) for each in (x, w)]
    total = torch.empty(M, N)
    running = plan.start((x, w), (None, None), kept, (), (None, None), (total,))
    *_, noted = running.product(0)
    rows = [planes_of(each, "fp8")[0] for each in (x, w)]
    assert noted.tolist()[:2] == [float(plane.scale) for plane in rows]
    assert noted.tolist()[2::2] == [float(each.abs().max()) for each in (x, w)]
    assert noted.tolist()[3::2] == [float((448.0 / each.abs().max().double()).float()) for each in (x, w)]
    assert torch.equal(product_of(running, 0, total), expected_product(*rows))
    assert all(same_plane(found, wanted.read(COLUMNWISE)) for found, wanted in zip(kept, rows, strict=True))

    given = [plane.read(COLUMNWISE) for plane in rows[::-1]]
    half = HalfStep((both(dy, (False, False)),), given, (ProductOf(0, 2), ProductOf(1, 3)))
    totals = torch.empty(M, K), torch.empty(N, K)
    running = CPU.step_plan(half).start((dy,), (None,), (), given, (None,), totals)
    dy_row = planes_of(dy, "fp8")[0]
    assert torch.equal(product_of(running, 0, totals[0]), expected_product(dy_row, given[0]))
    assert torch.equal(product_of(running, 1, totals[1]), expected_product(dy_row.read(COLUMNWISE), given[1]))


def test_scales_may_be_given():
    """For per-tensor FP8. Scales that are not positive numbers are refused, whatever is encoded."""
    x, w, total = numbers((M, K)), numbers((N, K), seed=8), torch.empty(M, N)
    scales = torch.tensor([60.0]), torch.tensor([0.7])
    half = forward_of(x, w, "fp8")
    makes = [make._replace(scale=scale) for make, scale in zip(half.makes, scales, strict=True)]
    plan = CPU.step_plan(half._replace(makes=makes))
    assert plan.suits((x, w), scales, ())
    for others in ((None, scales[1]), (scales[0], scales[1].double()), (scales[0], torch.ones(2)), (None, None)):
        assert not plan.suits((x, w), others, ())
    assert not CPU.step_plan(half).suits((x, w), scales, ())

    def written(matrix, scale):
        targets = []
        for way, encoding in encodings("fp8"):
            targets.append(Target(new_plane(matrix, way, encoding), encoding, matrix.abs().amax().view(1), scale))
        REFERENCE.encode(matrix, targets, None)
        return [target.plane for target in targets]

    for factor in (1.0, 2.0**-130, 2.0**100):  # also under which reciprocals are subnormal, and all is saturated
        given = [scale * factor for scale in scales]
        kept = [new_plane(each, *encodings("fp8")[1]) for each in (x, w)]
        running = plan.start((x, w), given, kept, (), (None, None), (total,))
        left, right, noted = running.product(0)
        planes = [written(matrix, scale) for matrix, scale in zip((x, w), given, strict=True)]
        assert all(same_plane(found, wanted[1]) for found, wanted in zip(kept, planes, strict=True))
        assert noted.tolist()[:2] == [float(rows.scale) for rows, _ in planes]
        assert noted.tolist()[2::2] == [float(each.abs().max()) for each in (x, w)]
        assert all(
            torch.equal(mine, CPU.decode_operand(kernels.under_scale_one(rows)))
            for mine, (rows, _) in zip((left, right.t()), planes, strict=True)
        )
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        for at in range(2):
            given = list(scales)
            given[at] = torch.tensor([bad])
            assert plan.start((x, w), given, kept, (), (None, None), (total,)).product(0) is None


def test_scales_of_blocks_cannot_be_given():
    half = forward_of(numbers((M, K)), numbers((N, K)), "mxfp8")
    makes = [make._replace(scale=torch.ones(1)) for make in half.makes]
    assert CPU.step_plan(half._replace(makes=makes)) is None


def backward_plan(dy, x, w):
    """The plan of a backward pass in MXFP8, and its given planes."""
    given = planes_of(w, "mxfp8", CPU)[1], planes_of(x, "mxfp8", CPU)[1]
    return CPU.step_plan(backward_of(dy, *given, "mxfp8")), given


def test_another_layer_may_run_between_the_products_of_one():
    """As the handler of a signal may do it: planes that have no tensors are not overwritten."""
    dy, x, w = numbers((M, N)), numbers((M, K)), numbers((N, K))
    plan, given = backward_plan(dy, x, w)
    totals = torch.empty(M, K), torch.empty(N, K)
    running = plan.start((dy,), (None,), (), given, (None,), totals)
    first = product_of(running, 0, totals[0]).clone()
    with kernels.own_workspaces:
        other = plan.start((dy * -3,), (None,), (), given, (None,), (torch.empty(M, K), torch.empty(N, K)))
        for number in range(2):
            other.product(number)
    second = product_of(running, 1, totals[1])
    dy_row, dy_column = planes_of(dy, "mxfp8")
    assert torch.equal(first, expected_product(dy_row, given[0]))
    assert torch.equal(second, expected_product(dy_column, given[1]))


def test_operands_beyond_the_limit_of_workspaces_have_no_plan(monkeypatch):
    """Also if what is encoded is small: the weight of backward is given."""
    dy, x, w = numbers((M, N)), numbers((M, K)), numbers((N, K))
    assert backward_plan(dy, x, w)[0] is not None
    monkeypatch.setattr("crossgrain.kernels.cpu.step_plans.LIMIT_BYTES", N * K * 4)
    assert backward_plan(dy, x, w)[0] is None


@pytest.mark.parametrize("away", [0, 4, 60])
def test_what_is_written_past_the_caches_begins_at_a_line(away, monkeypatch):
    monkeypatch.setattr("crossgrain.kernels.cpu.step_plans._STREAM_FROM", 1)
    dy, x, w = numbers((M, N)), numbers((M, K)), numbers((N, K))
    plan, given = backward_plan(dy, x, w)
    aligned = torch.empty(1 << 16)
    assert aligned.data_ptr() % 64 == 0
    memory = {name: aligned[number * (1 << 14) + away // 4 :] for number, name in enumerate(("gemm.a", "gemm.b"))}
    real = step_plans.workspace
    monkeypatch.setattr(step_plans, "workspace", lambda name, size: memory.get(name, real("planes", size)))
    totals = torch.empty(M, K), torch.empty(N, K)
    running = plan.start((dy,), (None,), (), given, (None,), totals)
    found = [product_of(running, number, total) for number, total in enumerate(totals)]
    planes = planes_of(dy, "mxfp8")
    assert all(
        torch.equal(one, expected_product(*pair))
        for one, pair in zip(found, zip(planes, given, strict=True), strict=True)
    )


def test_planes_with_other_buffers_do_not_suit():
    dy, x, w = numbers((M, N)), numbers((M, K)), numbers((N, K))
    plan, (w_plane, x_plane) = backward_plan(dy, x, w)
    assert plan.suits((dy,), (None,), (w_plane, x_plane))
    data, scale = w_plane.data, w_plane.scale

    def other(data=data, scale=scale, stale=False):
        return Plane(w_plane.format, w_plane.direction, w_plane.shape, data, scale, None, w_plane.transposed, stale)

    others = [
        other(data=data.t().contiguous().t()),
        other(data=data[:32]),
        other(data=data.to(torch.int8)),
        other(scale=scale[:, :-4]),
        other(scale=scale.t().contiguous().t()),
        other(data=torch.nn.Parameter(data, requires_grad=False)),
        other(scale=scale.view(torch.int8)),
        other(stale=True),
    ]
    assert not any(plan.suits((dy,), (None,), (each, x_plane)) for each in others)
    assert not plan.suits((dy.t().contiguous().t(),), (None,), (w_plane, x_plane))


def test_work_that_several_threads_would_share_is_not_for_one(monkeypatch):
    """By its largest piece: a matrix, a plane that is given, or a product from codes."""
    plan, _ = backward_plan(numbers((M, N)), numbers((M, K)), numbers((N, K)))
    for threads, each in ((1, 1), (2, 1), (2, N * K // 2), (2, N * K // 2 + 1)):
        monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", str(threads))
        monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", each)
        assert plan.is_for_one_thread() is (threads == 1 or each > N * K // 2)
    x, w = numbers((M, K)), numbers((N, K))
    plan = CPU.step_plan(forward_of(x, w, "nvfp4"))
    if plan is not None:
        assert not plan.is_for_one_thread()
        monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", M * N * K // 16)
        assert plan.is_for_one_thread()


def test_what_kernels_cannot_do_alone_has_no_plan():
    x, w = numbers((M, K)), numbers((N, K))
    for name in ("mxint8", "nvfp4_row_scaled"):
        ways = encodings_of(name, (ROWWISE, COLUMNWISE))
        makes = made(x, ways, (False, True)), made(w, ways, (False, True))
        assert CPU.step_plan(HalfStep(makes, (), (ProductOf(0, 2),))) is None
    what = forward_of(x, w, "mxfp8")
    assert CPU.step_plan(what) is not None and REFERENCE.step_plan(what) is None
    assert CPU.step_plan(what._replace(products=())) is None
    assert CPU.step_plan(forward_of(x.double(), w, "mxfp8")) is None


def test_plans_are_cached_by_what_they_depend_on_and_bounded(monkeypatch):
    x, w, known, built = numbers((M, K)), numbers((N, K)), {}, []

    def what():
        built.append(1)
        return forward_of(x, w, "mxfp8")

    first = kernels.step_plan(x, ("a",), known, what, None)
    assert kernels.step_plan(x, ("a",), known, what, None) is first and len(built) == 1
    monkeypatch.setattr(kernels, "_MOST_STEP_PLANS", 3)
    for number in range(10):
        kernels.step_plan(x, (number,), known, what, None)
        assert len(known) <= 3
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(RuntimeError, match="flush-to-zero is on"):
            kernels.step_plan(x, ("a",), known, what, None)
    finally:
        torch.set_flush_denormal(False)
