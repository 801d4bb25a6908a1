import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from specdec.nn.mlp import SwiGLU
from tests.tiny import HIDDEN, llama_config


def test_equals_llamas() -> None:
    torch.manual_seed(0)
    theirs = LlamaMLP(llama_config()).double()
    ours = SwiGLU(HIDDEN, llama_config().intermediate_size).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    assert ours(x).std() > 0
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-14)
