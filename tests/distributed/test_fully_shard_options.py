"""What fully_shard can be told, and what training loops do with it."""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import crossgrain as cg
from crossgrain.distributed import gather_quantized

from ..common.ranks import (
    batches,
    converted_model,
    digest,
    error_of,
    high_precision,
    mesh_of,
    quantized_model,
    run,
    shard,
    train,
)

QUANTIZED, CONVERTED = "nvfp4-plain", "fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4"  # nothing is rounded at random


def models(mesh=None, hidden=90, **options):
    """Both kinds, each with its optimizer; sharded if there is a mesh."""
    kept, converted = quantized_model(QUANTIZED), converted_model(CONVERTED, hidden=hidden)
    if mesh is not None:
        gather_quantized(converted)
        shard(kept, mesh, **options)
        shard(converted, mesh, **options)
    return {
        "quantized": (kept, cg.optim.FusedAdam(kept.parameters(), lr=1e-2, master_weights=True)),
        "converted": (converted, torch.optim.AdamW(converted.parameters(), lr=1e-2)),
    }


def batch(step, rank, micro):
    return batches(1, seed=100 * step + 10 * rank + micro)[0]


def _own_batches(rank, mesh_sizes, micros, steps, options):
    found = {}
    for name, (model, optimizer) in models(mesh_of(*mesh_sizes), **options).items():
        losses = []
        for step in range(steps):
            for micro in range(micros):
                model.set_requires_gradient_sync(micro == micros - 1)
                loss = model(batch(step, rank, micro)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = losses, digest(model)
    return found


def one_process(ranks, micros, steps):
    """The same with gradients added up in the order of ranks: pairs, then pairs of pairs."""
    found = {}
    for name, (model, optimizer) in models().items():
        parameters, losses = list(model.parameters()), [[] for _ in range(ranks)]
        for step in range(steps):
            sums = []
            for rank in range(ranks):
                for micro in range(micros):
                    loss = model(batch(step, rank, micro)).square().mean()
                    loss.backward()
                    losses[rank].append(loss.item())
                sums.append([p.grad for p in parameters])
                optimizer.zero_grad()
            while len(sums) > 1:
                pairs = zip(sums[::2], sums[1::2], strict=True)
                sums = [[(a + b) / 2 for a, b in zip(left, right, strict=True)] for left, right in pairs]
            for parameter, gradient in zip(parameters, sums[0], strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        found[name] = losses, model
    return found


def check(found, alone):
    for rank, of_rank in enumerate(found):
        for name, (losses, hashed) in of_rank.items():
            assert losses == alone[name][0][rank], (rank, name)
            assert hashed == found[0][name][1], "no drift between ranks"
    for of_rank in found:
        assert of_rank["quantized"][1] == digest(alone["quantized"][1])


def test_each_rank_has_its_own_data_and_accumulates_gradients(tmp_path):
    alone = one_process(2, micros=2, steps=10)
    check(run(_own_batches, 2, tmp_path, (2,), 2, 10, {}), alone)


def test_replicas_of_shards(tmp_path):
    """HSDP on 2x2 ranks: gradients are scattered over pairs, then averaged over replicas."""
    alone = one_process(4, micros=1, steps=5)
    check(run(_own_batches, 4, tmp_path, (2, 2), 1, 5, {}), alone)


def test_shard_meshes_of_one_rank(tmp_path):
    alone = one_process(2, micros=1, steps=4)
    check(run(_own_batches, 2, tmp_path, (2, 1), 1, 4, {"reshard_after_forward": True}), alone)
    alone = one_process(1, micros=1, steps=4)
    check(run(_own_batches, 1, tmp_path, (1,), 1, 4, {"reshard_after_forward": True}), alone)


def test_offloaded_shards_and_weights_that_stay_gathered(tmp_path):
    alone = one_process(2, micros=1, steps=4)
    for options in ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"reshard_after_forward": False}):
        check(run(_own_batches, 2, tmp_path, (2,), 1, 4, options), alone)


def _mixed_precision(rank, ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name, (model, optimizer) in models(mesh_of(ranks), mp_policy=policy).items():
        losses = train(model, optimizer, 4)
        dtypes = {p.dtype for p in model.parameters()}
        model[0].unshard()
        gathered = model[0].weight.dtype
        found[name] = losses, digest(model), dtypes, gathered
    return found


def test_mixed_precision_policy(tmp_path):
    """Layers compute in bf16; weights are quantized from the float32 shards, on two ranks as on one."""
    (alone,) = run(_mixed_precision, 1, tmp_path, 1)
    for found in run(_mixed_precision, 2, tmp_path, 2):
        assert found == alone
        assert all(dtypes == {torch.float32} and seen == torch.bfloat16 for _, _, dtypes, seen in found.values())


def _clipped(rank, ranks):
    found = {}
    for name, (model, optimizer) in models(mesh_of(ranks) if ranks else None).items():
        norms = []
        for x in batches(5):
            model(x).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
            optimizer.step()
            optimizer.zero_grad()
        found[name] = norms, digest(model), high_precision(model) if name == "converted" else None
    return found


def test_clip_grad_norm(tmp_path):
    """A norm is summed shard by shard, so it is the whole's up to rounding: a few float32 steps of 6e-8."""
    alone = _clipped(0, 0)
    found = run(_clipped, 2, tmp_path, 2)
    for of_rank in found:
        for name, (norms, hashed, weights) in of_rank.items():
            assert min(norms) > 0.05, "it clips"
            torch.testing.assert_close(norms[:1], alone[name][0][:1], rtol=1e-6, atol=0)
            assert norms == found[0][name][0]
            assert hashed == found[0][name][1]
            if weights is not None:
                for path, value in alone[name][2].items():
                    # One code that rounds to the other side moves Adam by less than its learning rate.
                    torch.testing.assert_close(weights[path], value, rtol=0, atol=1e-2)


def _unsupported(rank):
    found = []
    for options in ({"reshard_after_forward": 2}, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}):
        for model, _ in models(mesh_of(4), hidden=128, **options).values():
            found.append(error_of(lambda model=model: model(batches(1)[0]).sum().backward()))
    return found


def test_what_torch_has_no_hooks_for_raises_on_all_ranks(tmp_path):
    """Resharding to a smaller mesh, and shards along another dimension than the first."""
    for errors in run(_unsupported, 4, tmp_path):
        assert len(errors) == 4
        assert all(kind == "RuntimeError" for kind, _ in errors)
        assert "shard the weight along its first dimension" in errors[3][1]
