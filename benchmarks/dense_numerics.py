"""How far the dense step and the general path in bfloat16 are from float32, and from each other. Needs one Hopper GPU.

    python benchmarks/dense_numerics.py --models llama-1b,qwen3-0.6b,qwen3-8b

Random weights of the presets' shapes; contexts of 37, 200 and 511 random tokens, computed by the general path in
bfloat16 and then read by all three. Prints, for logits and for the written keys and values, the shadow check's measure:
over rows, the largest difference divided by the row's largest value.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from lowlat.bench.presets import DenseShape, find_shape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat_nvidia.specs import DENSE
from lowlat_plugin import LowLatency, Mode, Policy, Registry
from lowlat_plugin.conformance import Case, ReferenceHost
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.steps import Shape

SHAPES = (Shape(Mode.DECODE, 1, 1), Shape(Mode.DECODE, 7, 7), Shape(Mode.VERIFY, 2, 8))


def make_case(shape: DenseShape, seed: int, gain: float) -> Case:
    """Weights as `lowlat bench` draws them, or with `gain` in every projection (0: as drawn)."""
    checkpoint = RandomCheckpoint(shape, seed, "cuda")
    weights = {}
    for name in checkpoint.names():
        weight = checkpoint.tensor(name, torch.float32)
        if gain and weight.dim() == 2:
            weight *= gain / 0.02 * (1.0 if "embed" in name else weight.shape[1] ** -0.5)
        weights[name] = weight.to(torch.bfloat16)
    return Case(
        DENSE, checkpoint.config, weights, isa="sm_90", device="cuda", dtype="bfloat16", page_size=16,
        tokens_per_request=4,
    )  # fmt: skip


def worst(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    return float(((a.float() - b.float()).abs().amax(-1) / scale.float().abs().amax(-1)).max())


def distances(case: Case, shapes: tuple[Shape, ...], seed: int) -> dict[str, float]:
    host = ReferenceHost(case, pages=400)
    registry = Registry()
    registry.register(DENSE, "lowlat-nvidia")
    low = LowLatency(host, registry, Policy.REQUIRE)
    for stage in (low.choose, low.build, low.bind):
        stage()
    wide = {name: tensor.float() for name, tensor in case.weights.items()}
    exact = ReferenceHost(dataclasses.replace(case, dtype="float32", weights=wide), pages=400)
    found: dict[str, float] = {}
    with torch.inference_mode():
        shadow = Shadow(host, shapes, (37, 200, 511), seed)
        for mine, theirs in zip(exact.layers, host.layers, strict=True):
            mine.k_SHD.copy_(theirs.k_SHD)
            mine.v_SHD.copy_(theirs.v_SHD)
        for shape in shapes:
            step = shadow._without_nan(shadow.step(shape))
            results: dict[str, Any] = {}
            for name, run, layers in (
                ("exact", lambda s: exact.general(s).logits_RV, exact.layers),
                ("general", lambda s: host.general(s).logits_RV, host.layers),
                ("kernel", lambda s: low.forward(s).clone(), host.layers),
            ):
                logits = run(step)
                kv = [pool[step.write_slots_R].float() for layer in layers for pool in (layer.k_SHD, layer.v_SHD)]
                results[name] = logits, torch.stack(kv)
            for name, a, b in (("general", 0, 1), ("kernel", 0, 2), ("between", 1, 2)):
                pair = list(results.values())
                for what, index in (("logits", 0), ("kv", 1)):
                    value = worst(pair[b][index], pair[a][index], pair[0][index])
                    found[f"{what} {name}"] = max(found.get(f"{what} {name}", 0.0), value)
                given_up = pair[a][0].amax(-1) - pair[a][0].gather(-1, pair[b][0].argmax(-1, keepdim=True))[:, 0]
                found[f"greedy {name}"] = max(found.get(f"greedy {name}", 0.0), float(given_up.max()))
    low.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-1b,qwen3-0.6b,qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--gains", default="0,1")
    args = parser.parse_args()
    for model in args.models.split(","):
        for gain in map(float, args.gains.split(",")):
            for seed in range(args.seeds):
                found = distances(make_case(find_shape(model, args.layers), seed, gain), SHAPES, seed)
                text = ", ".join(f"{name} {value:.2e}" for name, value in found.items())
                print(f"{model} gain {gain or 'as drawn'} seed {seed}: {text}", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
