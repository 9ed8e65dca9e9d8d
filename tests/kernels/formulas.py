"""Every kernel's formula in plain torch and autograd: what the kernels must equal."""

import torch

from kernels.stateless_mask import keep_mask


def layer_norm(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def rms_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def bias_gelu(x, bias):
    x = x + bias
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def swiglu(x):
    gate, value = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * value


def rotary(x, cos, sin, interleaved):
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned, rest], -1)


def masked_softmax(scores, mask, scale, causal):
    visible = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask
    if causal:
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
    p = torch.softmax((scores * scale).masked_fill(~visible, -1e30), -1)
    return p * visible


def bias_dropout_add(x, bias, residual, keys, p):
    keep = keep_mask(keys, x.shape[-1], p)
    return residual + (x + bias) * keep / (1 - p)


def gradients(function, *operands):
    """(outputs, gradients of the operands that are floating-point) under a fixed upstream."""
    given = [
        x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in operands
    ]
    out = function(*given)
    outs = out if isinstance(out, tuple) else (out,)
    make = torch.Generator().manual_seed(7)
    above = [torch.randn(o.shape, generator=make, dtype=torch.float64).to(o) for o in outs]
    wanted = [x for x in given if torch.is_tensor(x) and x.requires_grad]
    grads = torch.autograd.grad(outs, wanted, above)
    return [*(o.detach() for o in outs), *grads]


def double(operands):
    return [
        x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in operands
    ]


def errors(got, exact):
    """Relative error of each tensor."""
    return [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True)]
