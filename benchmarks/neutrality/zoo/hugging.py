"""Tiny models from the transformers library, built from configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.tiny import tiny

NAMES = """
albert aria bart beit bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot
blip bloom camembert canine chinese_clip clip clipseg codegen cohere2 convbert convnext
convnextv2 cpmant ctrl data2vec-audio deberta deberta-v2 deepseek_v3 deit diffllama dinov2
dinov3_vit distilbert dpr dpt electra ernie4_5_moe exaone4 falcon falcon_mamba flava fnet
focalnet fsmt gemma gemma2 gemma3 git glm4_moe glpn gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss
gptj granitemoe groupvit hiera hubert ibert imagegpt jetmoe layoutlm led lfm2 llama llama4 llava
longformer luke m2m_100 mamba marian mbart minimax mistral mixtral mllama mobilenet_v2 mobilevit
modernbert mpnet mpt mra mt5 nllb-moe nystromformer olmo2 olmoe openai-gpt opt owlvit pegasus_x
phi3 phimoe poolformer prophetnet pvt_v2 qwen2_moe qwen3 qwen3_next qwen3_vl regnet rembert
resnet roberta roformer rwkv seamless_m4t segformer sew-d smollm3 splinter squeezebert stablelm
swiftformer swinv2 t5gemma tapas timesformer umt5 unispeech-sat videomae visual_bert vit vit_mae
vitdet vivit wav2vec2 wav2vec2-conformer wavlm whisper xglm xlm-roberta xlnet yolos yoso
""".split()
"""Model types that `tiny` can shrink and that train on random inputs."""

_BATCH, _LENGTH = 3, 12


def build(name: str) -> Program:
    """Return a training run of the tiny model of a type, on random inputs."""
    transformers_logging.set_verbosity_error()
    config = tiny(AutoConfig.for_model(name))
    model = _model(config)
    model.train()
    inputs = _inputs(model, config)

    def loss(net: nn.Module) -> Tensor:
        output = net(**inputs())
        given = getattr(output, "loss", None)
        return given if given is not None else _sizes(output)

    return usual(model, loss)


def _model(config: PreTrainedConfig) -> nn.Module:
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel):
        if type(config) in auto._model_mapping:
            model: nn.Module = auto.from_config(config)
            return model
    raise ValueError(f"no model for {type(config).__name__}")


def _sizes(output: Any) -> Tensor:
    """Return a loss that depends on all outputs of a model."""
    tensors = [t for t in _floats(output) if t.numel()]
    trained = [t for t in tensors if t.requires_grad] or tensors  # an evaluation has none
    return torch.stack([t.float().pow(2).mean() for t in trained]).sum()


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _floats(child)
    elif isinstance(value, dict):
        for child in value.values():
            yield from _floats(child)


def _inputs(model: nn.Module, config: Any) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws the arguments of a model according to their names."""
    names = set(inspect.signature(model.forward).parameters)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = int(getattr(text, "vocab_size", None) or 32)
    main = str(getattr(model, "main_input_name", "input_ids"))

    def tokens() -> Tensor:
        return torch.randint(4, words, (_BATCH, _LENGTH))

    def draw() -> dict[str, Tensor]:
        given = _signals(main, names, config)
        if "input_ids" in names:
            given["input_ids"] = tokens()
        if "decoder_input_ids" in names:
            given["decoder_input_ids"] = tokens()
        if "labels" in names and "input_ids" in given and "pixel_values" not in given:
            given["labels"] = given["input_ids"].clone()
            given.pop("decoder_input_ids", None)
        return given

    return draw


def _signals(main: str, names: set[str], config: Any) -> dict[str, Tensor]:
    """Return images or sounds for a model with such inputs."""
    if main == "input_values":
        return {main: torch.randn(_BATCH, 1600)}
    if main == "input_features":
        return {main: _features(config)}
    if "pixel_values" not in names:
        return {}
    if main.startswith("pixel_values") or "input_ids" not in names:
        return {"pixel_values": _pixels(config)}
    vision = getattr(config, "vision_config", None)
    if vision is None or hasattr(config, "image_token_id"):
        return {}  # text only: with an image, the text would have to mark its position
    return {"pixel_values": _pixels(vision)}


def _pixels(config: Any) -> Tensor:
    size = getattr(config, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = int(getattr(config, "num_channels", None) or getattr(config, "in_channels", 3) or 3)
    frames = getattr(config, "num_frames", None)
    shape = (_BATCH, channels, height, width)
    return (
        torch.randn(_BATCH, frames, *shape[1:]) if isinstance(frames, int) else torch.randn(shape)
    )


def _features(config: Any) -> Tensor:
    for name in ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_dim"):
        bins = getattr(config, name, None)
        if isinstance(bins, int):
            break
    else:
        bins = 16
    positions = getattr(config, "max_source_positions", None)
    if isinstance(positions, int) and getattr(config, "model_type", "") == "whisper":
        return torch.randn(_BATCH, bins, 2 * positions)
    return torch.randn(_BATCH, 32, bins)
