"""The attention region of a DeepSeek-V4.1 layer in plain PyTorch, after the formulas of its specification.

Suffixes as in attention_chain.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowlat_nvidia.deepseek_v4.attention_chain import CHOSEN, DIM, HEADS, WINDOW, ChainInputs, ChainPlan, ChainWeights
from lowlat_nvidia.formats import fp4_values, quantise


def random_weights(plan: ChainPlan, device: str) -> ChainWeights:
    """Weights whose products have ordinary sizes."""

    def matrix(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        raw = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        power = torch.randint(-7, -5, (outputs // 32, inputs // 32), device=device)
        return raw, torch.exp2(power.float())

    wq_a, wkv, wq_b = matrix(plan.latent, plan.hidden), matrix(DIM, plan.hidden), matrix(HEADS * DIM, plan.latent)
    wo_a = matrix(plan.groups * plan.group_outputs, plan.group_inputs)
    query_norm, key_norm = ((torch.rand(size, device=device) + 0.5).bfloat16() for size in (plan.latent, DIM))
    return ChainWeights(*wq_a, *wkv, *wq_b, *wo_a, query_norm, key_norm, torch.randn(HEADS, device=device))


def random_inputs(
    plan: ChainPlan, rows: int, device: str, *, window: int = WINDOW, chosen: int = CHOSEN
) -> ChainInputs:
    """Rows of one request at neighbouring positions; entries in random places, all unread bytes noise."""
    pages, page_entries, chosen_page = 5, 64, 256
    data = torch.randint(0, 256, (pages, page_entries * 528), dtype=torch.uint8, device=device)
    data[data == 0x7F], data[data == 0xFF] = 0, 0x80  # no NaN
    data[:, page_entries * DIM :] = torch.randint(
        117, 121, (pages, page_entries * 16), dtype=torch.uint8, device=device
    )
    picked = torch.randint(0, 256, (9, chosen_page * 288), dtype=torch.uint8, device=device)
    scales = (torch.rand(9, chosen_page * 32, device=device) * 0.2 + 0.02).to(torch.float8_e4m3fn)
    picked[:, chosen_page * 256 :] = scales.view(torch.uint8)
    places = torch.randperm(pages * page_entries, device=device)[: WINDOW + rows].int()
    window_RW = torch.stack([places[row + 1 : row + 1 + WINDOW] for row in range(rows)])
    window_RW[:, : WINDOW - window] = -1
    chosen_RC = torch.stack([torch.randperm(9 * chosen_page, device=device)[:CHOSEN].int() for _ in range(rows)])
    chosen_RC[:, chosen:] = -1
    angle = torch.rand(rows, 32, device=device) * 6.28
    angles = torch.stack((angle.cos(), angle.sin()), 1).contiguous()
    x = torch.randn(rows, plan.hidden, device=device).bfloat16()
    return ChainInputs(
        x, angles, data, picked, page_entries, chosen_page, window_RW.contiguous(), chosen_RC.contiguous()
    )


def _weight(raw: Tensor, scale: Tensor) -> Tensor:
    return raw.float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).bfloat16().float()


def _rotate(x: Tensor, angles: Tensor, sign: float) -> Tensor:
    """The last 64 values of x [R, ..., D], interleaved pairs, by the rows' angles."""
    cosine, sine = (angles[:, i].view(len(x), *[1] * (x.dim() - 2), -1) for i in (0, 1))
    even, odd = x[..., -64::2], x[..., -63::2]
    turned = torch.stack((even * cosine - sign * odd * sine, sign * even * sine + odd * cosine), -1).flatten(-2)
    return torch.cat((x[..., :-64], turned), -1)


def encode_keys(key_RD: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 bytes [R, D] and scale bytes [R, D / 32] of window entries."""
    groups = key_RD.view(len(key_RD), -1, 32)
    largest = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(largest)
    power = exponent - (mantissa == 0.5).int()
    data = (groups / torch.exp2(power.float())).to(torch.float8_e4m3fn).view(torch.uint8)
    return data.flatten(1), (power + 127).squeeze(-1).to(torch.uint8)


def _window_entry(inputs: ChainInputs, entry: int) -> tuple[Tensor, Tensor]:
    page, place = divmod(entry, inputs.window_page_entries)
    row = inputs.window[page]
    begin = inputs.window_page_entries * DIM + place * 16
    return row[place * DIM : (place + 1) * DIM], row[begin : begin + 16]


def _chosen_entry(inputs: ChainInputs, entry: int) -> Tensor:
    page, place = divmod(entry, inputs.chosen_page_entries)
    row = inputs.chosen[page]
    packed = row[place * 256 : (place + 1) * 256]
    begin = inputs.chosen_page_entries * 256 + place * 32
    scale = row[begin : begin + 32].view(torch.float8_e4m3fn).float()
    return fp4_values(packed) * scale.repeat_interleave(16)


def exact_product(x_RK: Tensor, raw_OK: Tensor, scale: Tensor) -> Tensor:
    """Quantised rows times FP8 weights, [R, O] float32."""
    return x_RK @ _weight(raw_OK, scale).T


def attention_region(
    weights: ChainWeights,
    inputs: ChainInputs,
    groups: int,
    eps: float,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = exact_product,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped outputs [R, O] float32, and the FP8 bytes and scale bytes of the step's keys.

    `inputs.window` is changed as the kernels change it: the step's keys are put into their entries. `product` stands in
    for the products of weights, where another rounding is of interest.
    """
    x, rows = quantise(inputs.x_RH), len(inputs.x_RH)
    query_latent = product(x, weights.wq_a, weights.wq_a_scale).bfloat16().float()
    key_latent = product(x, weights.wkv, weights.wkv_scale).bfloat16().float()
    key = _rotate(_norm(key_latent, weights.key_norm, eps), inputs.angles_R2P, 1.0).bfloat16().float()
    data, scales = encode_keys(key)
    for row, entry in enumerate(inputs.window_RW[:, -1].tolist()):
        into, into_scales = _window_entry(inputs, entry)
        into.copy_(data[row])
        into_scales.copy_(scales[row])
    latent = quantise(_norm(query_latent, weights.query_norm, eps))
    query = product(latent, weights.wq_b, weights.wq_b_scale).bfloat16().float().view(rows, HEADS, DIM)
    query = _rotate(query, inputs.angles_R2P, 1.0).bfloat16().float()
    mixed = torch.empty_like(query)
    for row in range(rows):
        keys = []
        for entry in inputs.window_RW[row].tolist():
            if entry >= 0:
                raw, scale = _window_entry(inputs, entry)
                keys.append(
                    raw.view(torch.float8_e4m3fn).float() * torch.exp2(scale.float() - 127).repeat_interleave(32)
                )
        keys += [_chosen_entry(inputs, entry) for entry in inputs.chosen_RC[row].tolist() if entry >= 0]
        keys_KD = torch.stack(keys)
        scores = torch.cat((query[row] @ keys_KD.T / DIM**0.5, weights.sinks[:, None]), 1)
        mixed[row] = scores.softmax(-1)[:, :-1] @ keys_KD
    mixed = _rotate(mixed, inputs.angles_R2P, -1.0).bfloat16().float()
    grouped = quantise(mixed.reshape(rows, -1)).view(rows, groups, -1)
    parts = zip(grouped.unbind(1), weights.wo_a.chunk(groups), weights.wo_a_scale.chunk(groups), strict=True)
    return torch.cat([product(*part) for part in parts], 1), data, scales
