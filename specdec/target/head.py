"""The output head with whatever the family does around it: scaling, capping, a bias.

Legend: B batch, T nodes, H hidden, V vocabulary, D some rows of it.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class _Decoded:
    """What a decoder returns, as far as the code after it looks: the last state, and None for all the rest."""

    def __init__(self, final_BTH: Tensor) -> None:
        self.last_hidden_state = final_BTH

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Stand:
    """The model, with some of its attributes replaced; the model itself is left alone."""

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced, _model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Done:
    """A decoder, or a module around it, that is done already: called at any depth it returns the final state."""

    def __init__(self, body: nn.Module, decoder: nn.Module, final_BTH: Tensor) -> None:
        self._body, self._decoder, self._final_BTH = body, decoder, final_BTH

    def __call__(self, *args: Any, **kwargs: Any) -> _Decoded:
        return _Decoded(self._final_BTH)

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._body, name)
        around = isinstance(part, nn.Module) and any(m is self._decoder for m in part.modules())
        return _Done(part, self._decoder, self._final_BTH) if around else part


class Head:
    """Runs the model's own ``forward`` from the final state on, by giving it a decoder that is already done.

    Families agree neither on names nor on meaning (Granite divides by its ``logits_scaling``, HyperCLOVA X
    multiplies), so the only head that is right for all of them is their own.

    Raises:
        ValueError: decoder or head are not where the model's ``forward`` would call them.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, head: nn.Linear) -> None:
        self._model, self._decoder, self._head = model, decoder, head
        bodies = [name for name, part in model.named_children() if any(m is decoder for m in part.modules())]
        heads = [name for name, part in model.named_children() if part is head]
        if len(bodies) != 1 or len(heads) != 1:
            raise ValueError(f"{type(model).__name__}: its decoder and output head are not its own direct parts")
        self._body_name, self._head_name = bodies[0], heads[0]
        self._body = model.get_submodule(self._body_name)

    def __call__(self, final_BTH: Tensor, rows_D: Tensor | slice | None) -> Tensor:
        """Logits, (B, T, V), or (B, T, D) for the vocabulary rows ``rows_D`` only; a slice copies no weights."""
        replaced: dict[str, Any] = {self._body_name: _Done(self._body, self._decoder, final_BTH)}
        if rows_D is not None:
            weight_DH = self._head.weight[rows_D]
            bias_D = None if self._head.bias is None else self._head.bias[rows_D]
            replaced[self._head_name] = lambda x_BTH: F.linear(x_BTH, weight_DH, bias_D)
        return type(self._model).forward(_Stand(self._model, replaced), use_cache=False).logits
