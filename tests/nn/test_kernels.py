"""Which kernel a device gets."""

import pytest
import torch

from specdec.nn.flex import Flex
from specdec.nn.kernels import unroll_kernel
from specdec.nn.unroll import Blocked, Dense

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "chosen", "kind"),
    [
        ("auto", CPU, "blocked", Blocked),
        ("auto", torch.device("mps"), "blocked", Blocked),
        ("auto", CUDA, "flex", Flex),
        ("dense", CPU, "dense", Dense),
        ("dense", CUDA, "dense", Dense),
        ("blocked", CUDA, "blocked", Blocked),
        ("flex", torch.device("cuda", 1), "flex", Flex),
    ],
)
def test_the_kernel_of_a_device(name: str, device: torch.device, chosen: str, kind: type) -> None:
    said, kernel = unroll_kernel(name, device)
    assert said == chosen and type(kernel) is kind


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flex", CPU, r"model\.attention=flex needs CUDA.*cpu.*use auto"),
        ("flex", torch.device("mps"), "mps"),
        ("flash", CPU, r"model\.attention must be auto or one of dense, blocked, flex, not 'flash'"),
        ("", CUDA, "not ''"),
    ],
)
def test_no_such_kernel(name: str, device: torch.device, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        unroll_kernel(name, device)
    assert "\n" not in str(error.value)
