"""Shrink the configuration of any model, based on names common to all libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

_HEADS, _HEAD = 4, 8
_WIDTH = _HEADS * _HEAD

_RULES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|.*_vocab_size|n_vocab|vocabulary_size)", 99),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|num_query_groups)", 2),
    (r".*(attention|decoder|encoder|num|n|mamba_n|state)_heads?", _HEADS),
    (r"(num_)?heads", _HEADS),
    (r"(head_dim|attention_head_dim|.*_head_dim|mamba_d_head|d_kv|head_size)", _HEAD),
    (r"(qk_rope_head_dim|rotary_dim)", _HEAD),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 16),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|inner_dim|ffn_hidden_size|mlp_dim)", 64),
    (r"(hidden_size|d_model|n_embd|embedding_size|embed_dim|projection_dim|dim)", _WIDTH),
    (
        r".*_(hidden_size|embed_dim|projection_dim|hidden_dim|d_model|proj_dim|embedding_dim)",
        _WIDTH,
    ),
    (r"(hidden_dim|out_hidden_size|d_embed|width|lru_width)", _WIDTH),
    (r"(num_hidden_layers|num_layers|n_layers?|n_layer|encoder_layers|decoder_layers|depth)", 2),
    (r".*num_(hidden_)?layers", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|top_k|moe_k|moe_topk|topk_group|n_group)", 2),
    (r"max_.*position.*|n_positions|n_ctx|max_seq_len", 64),
    (r"(image_size|img_size|crop_size)", 32),
    (r"(patch_size)", 8),
    (r"num_mel_bins|feature_size", 16),
    (r"(ssm_state_size|state_size|mamba_d_state|num_buckets|chunk_size|mamba_chunk_size)", 16),
    (r"(num_queries|num_query_tokens|num_frames|mask_time_length)", 4),
    (r"(sliding_window|attention_window|local_attention|block_size)", 8),
)


def tiny(config: Any) -> Any:
    """Shrink a configuration and those nested in it in place, and return it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            tiny(value)
            continue
        shrunk = _shrunk(name, value)
        if shrunk is not value:
            try:
                setattr(config, name, shrunk)
            except (TypeError, ValueError, NotImplementedError):
                continue
    _settle(config)
    return config


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not name or name.startswith("_"):
        return value
    if isinstance(value, int):
        if name.endswith("_token_id") and value >= 99:
            return 98
        for pattern, small in _RULES:
            if re.fullmatch(pattern, name):
                return min(value, small)
        return value
    if isinstance(value, Sequence) and value and all(type(v) is int for v in value):
        return _shrunk_list(name, list(value))
    return value


def _shrunk_list(name: str, values: list[int]) -> Any:
    if re.fullmatch(r".*(depths?|num_layers|layers_per.*|num_blocks|layer_depths|n_blocks)", name):
        return [1] * len(values)
    if re.fullmatch(r".*(hidden_sizes|embed_dims?|dims|channels|widths)", name):
        return [8 * 2 ** min(i, 3) for i in range(len(values))]
    if re.fullmatch(r".*(num_heads|num_attention_heads)", name):
        return [2] * len(values)
    if name == "image_size":
        return [32] * len(values)
    return values


def _settle(config: Any) -> None:
    """Adjust lists with one item per layer to the number of layers."""
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads  # latent attention has no groups
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    for name in ("layer_types", "layers_block_type", "attention_layers", "mlp_layer_types"):
        listed = getattr(config, name, None)
        if isinstance(listed, list) and len(listed) > layers:
            kinds = list(dict.fromkeys(listed))[:layers]
            setattr(config, name, (kinds + listed)[:layers])
