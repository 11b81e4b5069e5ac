"""`ModelConfig`: what a model definition needs to know of a checkpoint, whichever format it came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one group of layers.

    Parameter names are those of Hugging Face's `rope_parameters` / `rope_scaling`.
    """

    rope_type: str = "default"
    """default | linear | dynamic | llama3 | yarn | longrope"""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    """llama3"""
    high_freq_factor: float | None = None
    """llama3"""
    beta_fast: float | None = None
    """yarn; None = 32"""
    beta_slow: float | None = None
    """yarn; None = 1"""
    mscale: float | None = None
    """yarn"""
    mscale_all_dim: float | None = None
    """yarn"""
    attention_factor: float | None = None
    """yarn, longrope: factor on cos and sin; None = derived from the other fields"""
    truncate: bool = True
    """yarn: round the correction range to whole dimensions"""
    short_factor: tuple[float, ...] | None = None
    """longrope: [rotary_dim / 2]"""
    long_factor: tuple[float, ...] | None = None
    """longrope: [rotary_dim / 2]"""
    freq_factors: tuple[float, ...] | None = None
    """GGUF `rope_freqs.weight` [rotary_dim / 2]: inverse frequencies are divided by these (llama3 files carry them)"""
    rotary_dim: int | None = None
    """partial rotary: number of leading dimensions of a head that rotate; None = head_dim"""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and sizes. All counts are positive; `validate()` in the checkpoint readers guarantees it."""

    architecture: str
    """Key of the model registry: llama | mistral | mixtral | qwen2 | qwen3 | qwen3_moe | gemma2 | gemma3"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Neurons of a dense MLP; where every layer has experts, nothing reads it"""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rms_norm_weight_offset: float = 0.0
    """Added to each stored RMSNorm weight: 1.0 for Gemma in Hugging Face form, 0.0 where the file has it folded in"""
    hidden_act: str = "silu"
    """silu | gelu_tanh"""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    query_scale: float | None = None
    """Factor on the attention scores; None = head_dim ** -0.5"""
    embedding_scale: float = 1.0
    attn_logit_softcap: float = 0.0
    """0 = off"""
    final_logit_softcap: float = 0.0
    """0 = off"""
    layer_windows: tuple[int, ...] = ()
    """Sliding window per layer in tokens (a query sees itself and window - 1 tokens before it); 0 = full attention.
    Empty = all layers full."""
    num_experts: int = 0
    """MLPs of a layer that its router chooses from; 0 = no layer has any"""
    num_experts_per_tok: int = 0
    """How many of them a token takes, by the largest router logits"""
    moe_intermediate_size: int = 0
    """Neurons of an expert"""
    norm_topk_prob: bool = False
    """Whether the weights of the chosen experts are divided by their sum"""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a dense MLP although there are experts, ascending"""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Full-attention layers (all layers where `rope_local` is None)"""
    rope_local: RopeConfig | None = None
    """Sliding-window layers, where they differ (Gemma 3)"""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    """For people: the name the checkpoint gives itself; never a path"""

    def window(self, layer: int) -> int:
        """Sliding window of `layer`; 0 = full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward block of `layer` is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def layer_rope(self, layer: int) -> RopeConfig:
        """The RoPE variant that `layer` uses."""
        return self.rope_local if self.rope_local is not None and self.window(layer) else self.rope
