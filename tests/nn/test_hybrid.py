"""HBIN against a plain evaluation of the paper's Eq. (2)-(4), at its extremes, and inside real backbones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.functional.norms import Part, mixed_norm
from fedshift.nn.archs import build_network
from fedshift.nn.normalisation import (
    STATISTICS,
    HalfInstanceNorm,
    HybridNorm,
    InstanceNorm,
    convert_norms,
    forgetting,
    freeze_norms,
)

BATCH_ONLY = torch.tensor([60.0, -60.0])
INSTANCE_ONLY = torch.tensor([-60.0, 60.0])


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Values whose channels differ in mean and spread."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    channel = torch.arange(shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
    return x * (1 + channel) + 3 * channel - 2


def hybrid(channels: int, mean_logits: Tensor, var_logits: Tensor, seed: int = 1) -> HybridNorm:
    layer = HybridNorm(channels)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(channels, generator=drawn) + 0.5)
        layer.bias.copy_(torch.randn(channels, generator=drawn))
        layer.mean_logits.copy_(mean_logits)
        layer.var_logits.copy_(var_logits)
        layer.running_mean.copy_(torch.randn(channels, generator=drawn))
        layer.running_var.copy_(torch.rand(channels, generator=drawn) + 0.5)
    return layer


def by_the_paper(x: np.ndarray, layer: HybridNorm, training: bool) -> np.ndarray:
    """Eq. (2)-(4), one sample and channel after the other."""
    gamma, beta = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    lam, lam_ = layer.mean_logits.detach().double().numpy(), layer.var_logits.detach().double().numpy()
    w_bn, w_in = np.exp(lam) / np.exp(lam).sum()
    v_bn, v_in = np.exp(lam_) / np.exp(lam_).sum()
    out = np.empty_like(x)
    for e in range(x.shape[1]):
        mu_in = [x[b, e].mean() for b in range(len(x))]
        var_in = [((x[b, e] - mu_in[b]) ** 2).mean() for b in range(len(x))]
        if training:
            mu_bn = np.mean(mu_in)
            var_bn = np.mean([v + m**2 for v, m in zip(var_in, mu_in, strict=True)]) - mu_bn**2
        else:
            mu_bn, var_bn = float(layer.running_mean[e]), float(layer.running_var[e])
        for b in range(len(x)):
            mean = w_bn * mu_bn + w_in * mu_in[b]
            var = v_bn * var_bn + v_in * var_in[b]
            out[b, e] = gamma[e] * (x[b, e] - mean) / np.sqrt(var + 1e-5) + beta[e]
    return out


@pytest.mark.parametrize("shape", [(5, 4, 6, 7), (5, 4, 1, 1), (6, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_hybrid_norm_is_equations_2_to_4(shape: tuple[int, ...], training: bool) -> None:
    layer = hybrid(shape[1], torch.tensor([0.3, -0.4]), torch.tensor([-1.0, 0.5])).train(training)
    x = draw(*shape)
    expected = by_the_paper(x.double().numpy(), layer, training)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(5, 4, 6, 7), (6, 3)])
def test_hybrid_norm_is_batch_norm_when_lambda_favours_it(shape: tuple[int, ...]) -> None:
    layer = hybrid(shape[1], BATCH_ONLY, BATCH_ONLY)
    twin: nn.Module = nn.BatchNorm2d(shape[1]) if len(shape) == 4 else nn.BatchNorm1d(shape[1])
    twin.load_state_dict({key: value for key, value in layer.state_dict().items() if "logits" not in key})
    for batch in range(3):  # running statistics follow each other, unbiased variance included
        x = draw(*shape, seed=batch)
        torch.testing.assert_close(layer(x), twin(x), rtol=1e-5, atol=1e-5)
    for name, value in twin.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), value)
    assert layer.num_batches_tracked.dtype == torch.long and int(layer.num_batches_tracked) == 3
    torch.testing.assert_close(layer.eval()(x), twin.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_hybrid_norm_is_instance_norm_when_lambda_favours_it(training: bool) -> None:
    layer = hybrid(4, INSTANCE_ONLY, INSTANCE_ONLY).train(training)
    twin = nn.InstanceNorm2d(4, affine=True).train(training)
    twin.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    ours = InstanceNorm(4).train(training)
    ours.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x = draw(5, 4, 6, 7)
    torch.testing.assert_close(layer(x), twin(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x), twin(x), rtol=1e-5, atol=1e-5)


def test_lambda_starts_even_and_both_pairs_learn() -> None:
    layer = HybridNorm(3)
    assert layer.mean_logits.tolist() == layer.var_logits.tolist() == [1.0, 1.0]
    layer(draw(4, 3, 5, 5)).square().sum().backward()
    for logits in (layer.mean_logits, layer.var_logits):
        assert logits.grad is not None and logits.grad.abs().min() > 0
        # A softmax does not change when both logits grow alike.
        assert logits.grad.sum().abs() < 1e-3 * logits.grad.abs().max()


def test_switch_norm_adds_statistics_over_all_channels() -> None:
    layer = HybridNorm(3, with_layer=True).eval()
    with torch.no_grad():
        layer.mean_logits.copy_(torch.tensor([-60.0, -60.0, 60.0]))
        layer.var_logits.copy_(torch.tensor([-60.0, -60.0, 60.0]))
    x = draw(4, 3, 5, 5)
    torch.testing.assert_close(layer(x), nn.functional.layer_norm(x, (3, 5, 5)), rtol=1e-4, atol=1e-5)


def test_ibn_a_normalises_half_of_the_channels_by_instance() -> None:
    layer, x = HalfInstanceNorm(5), draw(4, 5, 6, 6)
    out = layer(x)
    torch.testing.assert_close(out[:, :2], nn.functional.instance_norm(x[:, :2]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:, 2:], nn.BatchNorm2d(3)(x[:, 2:]), rtol=1e-5, atol=1e-5)


def test_evaluation_is_deterministic_per_sample_and_changes_nothing() -> None:
    layer = hybrid(4, torch.tensor([0.2, 0.1]), torch.tensor([0.0, 0.4])).eval()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    x = draw(6, 4, 5, 5)
    assert torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer(x)[2:3], layer(x[2:3]))
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_layout_changes_neither_the_result_nor_itself(layout: torch.memory_format) -> None:
    x = draw(4, 3, 6, 5)
    weights = draw(4, 3, 6, 5, seed=9)
    found = []
    for view in (x.clone(), x.clone().to(memory_format=layout)):
        layer = HybridNorm(3)
        view.requires_grad_()
        out = layer(view)
        (out * weights).sum().backward()
        found.append((out.detach(), view.grad, layer.mean_logits.grad, layer.weight.grad))
    assert out.is_contiguous(memory_format=layout)
    for ours, twin in zip(*found, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-4)


def test_statistics_are_wide_in_narrow_precision() -> None:
    """In bfloat16 a mean of 300 has steps of 2: statistics computed in it would be far off."""
    layer = HybridNorm(2)
    x = draw(8, 2, 16, 16) + 300
    narrow = layer(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), layer(x.bfloat16().float()), rtol=0.01, atol=0.02)


@pytest.mark.parametrize("shape", [(3, 2, 3, 2), (4, 3)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_layer", [True, False])
def test_gradients_by_finite_differences(shape: tuple[int, ...], training: bool, with_layer: bool) -> None:
    """With respect to the input, gamma, beta and both pairs of lambda."""
    layer = HybridNorm(shape[1], with_layer=with_layer).double().train(training)
    names = ("weight", "bias", "mean_logits", "var_logits")
    drawn = torch.Generator().manual_seed(3)
    inputs = [torch.randn(getattr(layer, name).shape, generator=drawn, dtype=torch.float64) for name in names]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, {**dict(layer.named_buffers()), **parameters}, (x,))

    everything = [draw(*shape).double(), *inputs]
    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in everything])


def moments(x: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    ones, channels = torch.ones(1), x.shape[1]
    return mixed_norm(x.flatten(2), torch.ones(channels), torch.zeros(channels), ones, ones, (part,))[1]


@pytest.mark.parametrize(("part", "over"), [("batch", (0, 2, 3)), ("instance", (2, 3)), ("layer", (1, 2, 3))])
def test_moments_of_every_part(part: Part, over: tuple[int, ...]) -> None:
    x = draw(3, 4, 5, 6)
    mean, var = moments(x, part)
    torch.testing.assert_close(mean.squeeze(), x.mean(over), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(var.squeeze(), x.var(over, correction=0), rtol=1e-5, atol=1e-5)


def test_variance_survives_a_mean_far_from_zero() -> None:
    """The squares have steps of 1 in float32, so E[x^2] - E[x]^2 would miss the variance altogether."""
    x = torch.tensor([4096.0, 4096.5, 4097.0, 4097.5]).reshape(1, 1, 2, 2)
    assert moments(x, "instance")[1].item() == pytest.approx(0.3125)
    assert moments(torch.full((1, 1, 2, 2), 77.0), "batch")[1].item() == 0
    assert InstanceNorm(1)(x).std(correction=0).item() == pytest.approx(1.0, rel=1e-3)


# --- Putting the layers into a backbone --------------------------------------------------------------------------


def layers_of(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, kind)]


def net(arch: str, side: int = 32) -> Any:
    """A net whose norms have learned something, in evaluation mode."""
    built = build_network(arch, (3, side, side), 5, generator_seed=0)
    drawn = torch.Generator().manual_seed(1)
    for name, value in built.backbone.state_dict().items():
        if "running" in name or (("norm" in name or "bn" in name) and value.is_floating_point()):
            value.copy_(torch.rand(value.shape, generator=drawn) + 0.5)
    return built.eval()


@pytest.mark.parametrize("arch", ["digits-copa", "digits-copa5", "resnet18", "mobilenet_v2", "efficientnet_lite0"])
def test_conversion_keeps_the_outputs_when_lambda_favours_batch_norm(arch: str) -> None:
    built, x = net(arch), torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        before = built(x)
        convert_norms(built.backbone, "hbin")
        assert not layers_of(built.backbone, nn.BatchNorm2d) and not built.backbone.training
        assert (built(x) - before).abs().max() > 1e-3 * before.abs().max()
        for layer in built.backbone.modules():
            if isinstance(layer, HybridNorm):
                assert not layer.training
                layer.mean_logits.copy_(BATCH_ONLY)
                layer.var_logits.copy_(BATCH_ONLY)
        torch.testing.assert_close(built(x), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))


@pytest.mark.parametrize("arch", ["digits-copa5", "mlp"])
def test_norms_of_vectors_stay(arch: str) -> None:
    shape = (3, 32, 32) if arch != "mlp" else (7,)
    backbone = build_network(arch, shape, 5, 0).backbone
    vectors = layers_of(backbone, nn.BatchNorm1d)
    convert_norms(backbone, "hbin" if arch != "mlp" else "bn")
    assert layers_of(backbone, nn.BatchNorm1d) == vectors != []


def test_first_stage_is_the_first_norm_and_the_first_residual_stage() -> None:
    backbone = net("resnet18").backbone
    convert_norms(backbone, "hbin", "first-stage")
    inside = [f"layer1.{block}.bn{number}" for block in (0, 1) for number in (1, 2)]
    assert layers_of(backbone, HybridNorm) == ["bn1", *inside]
    assert len(layers_of(backbone, nn.BatchNorm2d)) == 15


@pytest.mark.parametrize(
    ("arch", "where", "count"),
    [("resnet18", "first-block", 3), ("resnet18", "first-stage", 5), ("resnet101", "first-stage", 11)],
)
def test_as_many_norms_are_replaced_as_in_the_paper(arch: str, where: Any, count: int) -> None:
    """Office-Home: the first norm and those of the first BasicBlock; Office-Caltech10: those of the first macro
    block."""
    backbone = build_network(arch, (3, 32, 32), 5, 0).backbone
    convert_norms(backbone, "hbin", where)
    assert len(layers_of(backbone, HybridNorm)) == count
    if where == "first-block":
        assert layers_of(backbone, HybridNorm) == ["bn1", "layer1.0.bn1", "layer1.0.bn2"]


def test_first_block_without_residual_blocks_is_the_first_stage() -> None:
    backbone = net("digits-copa").backbone
    convert_norms(backbone, "hbin", "first-block")
    assert layers_of(backbone, HybridNorm) == ["block1.norm"]


@pytest.mark.parametrize(("variant", "most"), [("hbin", 0.15), ("switch", 0.35)])
def test_started_on_the_batch_a_network_is_near_to_what_it_was(variant: Any, most: float) -> None:
    """SwitchNorm less so: its layer statistics are further from a channel's own."""
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    away = {}
    for start in ("equal", "batch"):
        built = net("digits-copa")
        with torch.no_grad():
            built.train()(x)  # random statistics, moved a tenth of the way towards those of x
            before = built.eval()(x)
            convert_norms(built.backbone, variant, "all", start)
            away[start] = float((built(x) - before).norm() / before.norm())
    assert away["batch"] < most and away["batch"] < away["equal"] / 3, away


@pytest.mark.parametrize("variant", ["hbin", "switch", "in", "ibn-a", "ibn-b"])
def test_forgetting_covers_what_replaces_batch_norm(variant: Any) -> None:
    """By batches as in training, but nothing is remembered, not even that there was a batch."""
    built, x = net("resnet18").train(), torch.rand(4, 3, 32, 32)
    convert_norms(built.backbone, variant, "first-stage")
    before = {key: value.clone() for key, value in built.state_dict().items()}
    with forgetting(built):
        found = built(x)
    assert all(torch.equal(value, before[key]) for key, value in built.state_dict().items())
    torch.testing.assert_close(found, built(x))
    changed = {key for key, value in built.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if key.endswith((*STATISTICS, "num_batches_tracked"))}


@pytest.mark.parametrize("where", ["auto", "after-every-conv"])
def test_a_net_without_norms_gets_one_after_every_convolution(where: Any) -> None:
    built = net("digits-csac", side=28)
    convolutions = {name: value.clone() for name, value in built.backbone.state_dict().items()}
    convert_norms(built.backbone, "hbin", where)
    assert layers_of(built.backbone, HybridNorm) == ["conv1.conv.norm", "conv2.conv.norm"]
    assert torch.equal(built.backbone.state_dict()["conv1.conv.conv.weight"], convolutions["conv1.conv.weight"])
    assert built(torch.rand(2, 3, 28, 28)).shape == (2, 5)


def test_a_net_with_norms_gets_no_second_one() -> None:
    backbone = net("resnet18").backbone
    convert_norms(backbone, "hbin", "after-every-conv")
    assert len(layers_of(backbone, HybridNorm)) == len(layers_of(backbone, nn.Conv2d)) == 20


@pytest.mark.parametrize(("arch", "where"), [("digits-csac", "all"), ("digits-csac", "first-stage"), ("mlp", "auto")])
def test_a_net_with_nothing_to_convert_is_refused(arch: str, where: Any) -> None:
    backbone = build_network(arch, (7,) if arch == "mlp" else (3, 28, 28), 5, 0).backbone
    with pytest.raises(InputError, match="norm_where=after-every-conv") as caught:
        convert_norms(backbone, "hbin", where)
    assert caught.value.code == "method-needs"


def test_instance_norm_takes_over_scale_and_shift() -> None:
    built = net("digits-copa")
    old = built.backbone.state_dict()
    weight = old["block2.norm.weight"].clone()
    convert_norms(built.backbone, "in")
    assert layers_of(built.backbone, InstanceNorm) == [f"block{number}.norm" for number in (1, 2, 3, 4)]
    assert torch.equal(built.backbone.state_dict()["block2.norm.weight"], weight)


@pytest.mark.parametrize("variant", ["hbin", "switch", "ibn-a"])
def test_what_replaces_a_frozen_norm_is_frozen(variant: Any) -> None:
    """In training it gives what it gives in evaluation, and remembers nothing new; its own numbers still learn."""
    net = build_network("digits-copa", (3, 16, 16), 3, 0)
    freeze_norms(net)
    convert_norms(net.backbone, variant, "all")
    x = torch.rand(4, 3, 16, 16)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    expected = net.eval()(x)
    found = net.train()(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    statistics = {key for key in before if key.endswith((*STATISTICS, "num_batches_tracked"))}
    assert statistics and changed == set(before) - statistics


def test_ibn_a_takes_the_first_norm_of_each_block_but_not_the_last_stage() -> None:
    resnet, plain = net("resnet18").backbone, net("digits-copa").backbone
    old = {key: value.clone() for key, value in plain.state_dict().items()}
    convert_norms(resnet, "ibn-a")
    assert layers_of(resnet, HalfInstanceNorm) == [f"layer{n}.{block}.bn1" for n in (1, 2, 3) for block in (0, 1)]
    convert_norms(plain, "ibn-a")
    assert layers_of(plain, HalfInstanceNorm) == [f"block{number}.norm" for number in (1, 2, 3)]
    new = plain.state_dict()
    assert torch.equal(new["block1.norm.instance.weight"], old["block1.norm.weight"][:32])
    assert torch.equal(new["block1.norm.batch.running_var"], old["block1.norm.running_var"][32:])


def test_ibn_b_has_instance_norms_first_and_behind_two_stages() -> None:
    resnet, plain = net("resnet18").backbone, net("digits-copa").backbone
    convert_norms(resnet, "ibn-b")
    assert layers_of(resnet, InstanceNorm) == ["bn1", "layer1.norm", "layer2.norm"]
    convert_norms(plain, "ibn-b")
    assert layers_of(plain, InstanceNorm) == ["block1.stage.norm", "block1.norm", "block2.norm"]
    out = plain.block1(torch.rand(2, 3, 16, 16))
    assert out.shape == (2, 64, 8, 8) and out.min() == 0


@pytest.mark.parametrize("variant", ["hbin", "switch", "in"])
def test_a_converted_net_can_be_exported(variant: Any) -> None:
    built = net("digits-copa", side=16)
    convert_norms(built.backbone, variant)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(built, (torch.rand(4, 3, 16, 16),), dynamic_shapes=({0: batch},))
    x = torch.rand(7, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), built(x))


@pytest.mark.parametrize("variant", ["hbin", "switch", "in", "ibn-a", "ibn-b"])
def test_every_variant_trains_the_smallest_images(variant: Any) -> None:
    """At 16 pixels the last maps of a ResNet have one pixel: an instance norm there has nothing to divide by."""
    for arch in ("digits-copa", "resnet18"):
        built = net(arch, side=16).train()
        convert_norms(built.backbone, variant)
        built(torch.rand(4, 3, 16, 16)).square().sum().backward()
        assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in built.parameters())
