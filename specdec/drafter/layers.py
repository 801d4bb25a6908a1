"""The drafter's decoder layers behind its entry.

Legend: B batch, T nodes, H hidden, W width of the first attention's input.
"""

from torch import Tensor, nn

from specdec.drafter.config import DrafterConfig
from specdec.drafter.entry import Entered
from specdec.nn.attention import Attention
from specdec.nn.mlp import SwiGLU
from specdec.nn.norm import RMSNorm
from specdec.nn.rope import Rope
from specdec.nn.view import View


class Layer(nn.Module):
    """Attention and feed-forward around a residual path; the attention's input comes ready from outside."""

    def __init__(self, config: DrafterConfig, width_in: int, index: int) -> None:
        super().__init__()
        self.attention = Attention(
            width_in,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            index,
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, entered: Entered, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the layer, (B, T, H)."""
        middle_BTH = entered.residual_BTH + self.attention(entered.block_BTW, view, rope)
        return middle_BTH + self.mlp(self.post_attention_norm(middle_BTH))


class Layers(nn.Module):
    """The first layer reads what the entry made; each further one is a plain pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        widths = [config.entry.width(config.hidden_size)] + [config.hidden_size] * (config.num_layers - 1)
        self.layers = nn.ModuleList(Layer(config, width, index) for index, width in enumerate(widths))
        self.input_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in widths[1:])
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings)

    def forward(self, entered: Entered, view: View) -> Tensor:
        """The last layer's residual stream, (B, T, H)."""
        rope = self.rope.tables(view.positions_BT)
        out_BTH: Tensor = self.layers[0](entered, view, rope)
        for norm, layer in zip(self.input_norms, self.layers[1:], strict=True):
            out_BTH = layer(Entered(norm(out_BTH), out_BTH), view, rope)
        return out_BTH
