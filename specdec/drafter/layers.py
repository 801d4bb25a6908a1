"""The drafter's decoder layers behind its entry.

Legend: B batch, T nodes, H hidden.
"""

from torch import Tensor, nn

from specdec.drafter.config import DrafterConfig
from specdec.drafter.entry import Entered
from specdec.nn.attention import Attention
from specdec.nn.mlp import SwiGLU
from specdec.nn.norm import RMSNorm
from specdec.nn.rope import Rope
from specdec.nn.view import View


class Window(nn.Module):
    """Narrows a view to the last ``window`` positions; see :meth:`specdec.nn.view.View.within`."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, view: View) -> View:
        """The narrowed view."""
        return view.within(self.window)


class Layer(nn.Module):
    """Attention and feed-forward around a residual path; the attention's input comes ready from outside."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        norm = config.norms.build_heads(config)
        self.attention = Attention(config.hidden_size, heads, kv_heads, config.head_dim, index, norm)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, entered: Entered, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the layer, (B, T, H), or of the nodes that the view asks for."""
        middle_BTH = view.wanted(entered.residual_BTH) + self.attention(
            entered.block_BTH, view, rope, entered.beside_BTW
        )
        return middle_BTH + self.mlp(self.post_attention_norm(middle_BTH))


class Layers(nn.Module):
    """The first layer reads what the entry made; each further one is a plain pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        further = range(1, config.num_layers)
        self.input_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in further)
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings)
        self.sight = nn.Identity() if config.attention_window == "full" else Window(config.attention_window)

    def forward(self, entered: Entered, view: View) -> Tensor:
        """The last layer's residual stream, (B, T, H), or of the nodes that the view asks for."""
        rope, view = self.rope.tables(view.positions_BT), self.sight(view)
        views = [view._replace(asked_BM=None)] * (len(self.layers) - 1) + [view]
        out_BTH: Tensor = self.layers[0](entered, views[0], rope)
        for norm, layer, seen in zip(self.input_norms, self.layers[1:], views[1:], strict=True):
            out_BTH = layer(Entered(norm(out_BTH), None, out_BTH), seen, rope)
        return out_BTH
