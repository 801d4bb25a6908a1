"""One of two libraries by the processor, if it is as exact."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdec.nn import products
from specdec.nn.products import fast_products, small_products


@pytest.fixture(autouse=True)
def highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    products._choose.cache_clear()
    yield
    products._choose.cache_clear()
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("maker", "exact", "name", "setting"),
    [
        ("AuthenticAMD", True, "oneDNN", "medium"),
        ("AuthenticAMD", False, "torch's default", "highest"),  # fast because it rounds
        ("GenuineIntel", True, "torch's default", "highest"),
        ("", True, "torch's default", "highest"),
    ],
)
def test_the_processor_decides_and_no_clock(
    monkeypatch: pytest.MonkeyPatch, maker: str, exact: bool, name: str, setting: str
) -> None:
    monkeypatch.setattr(products, "_exact", lambda: exact)
    monkeypatch.setattr(products, "_maker", lambda: maker)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert "time" not in vars(products)
    with fast_products() as said:
        assert said == name and torch.get_float32_matmul_precision() == setting
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_setting_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_exact", lambda: True)
    monkeypatch.setattr(products, "_maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)

    def fail() -> None:
        assert torch.get_float32_matmul_precision() == "medium"
        raise KeyError

    with pytest.raises(KeyError), fast_products():
        fail()
    assert torch.get_float32_matmul_precision() == "highest"

    def broken() -> bool:
        raise KeyError

    monkeypatch.setattr(products, "_exact", broken)
    products._choose.cache_clear()
    with pytest.raises(KeyError), fast_products():
        pass
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("choice", ["high", "medium"])
def test_the_users_own_setting_stands(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(products, "_maker", lambda: pytest.fail("nothing to ask"))
    torch.set_float32_matmul_precision(choice)
    with fast_products() as said:
        assert choice in said and torch.get_float32_matmul_precision() == choice
    assert torch.get_float32_matmul_precision() == choice


def test_small_products_undo_the_choice_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_choose", lambda: True)

    def inside() -> str:
        with small_products():
            return torch.get_float32_matmul_precision()

    assert inside() == "highest"
    with fast_products():
        with fast_products():
            assert inside() == "highest" and torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError), small_products():
            raise KeyError
        assert inside() == "highest" and torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("medium")  # the user's
    with fast_products():
        assert inside() == "medium"
    assert inside() == "medium"


def test_a_processor_says_who_made_it(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n")
    (tmp_path / "arm").write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert products._maker(tmp_path / "x86") == "AuthenticAMD"
    assert products._maker(tmp_path / "arm") == ""
    assert isinstance(products._maker(tmp_path / "none"), str)


def test_the_probe_tells_a_lossy_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of numbers rounded to bfloat16, or to TF32's ten bits, are found out; float32's own are not."""
    assert products._exact()
    plain = torch.Tensor.__matmul__

    def rounded(bits: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def cut(x: torch.Tensor) -> torch.Tensor:
            return (x.view(torch.int32) >> (23 - bits) << (23 - bits)).view(torch.float32)

        return lambda a, b: plain(cut(a), cut(b)) if a.dtype == torch.float32 else plain(a, b)

    for bits in (7, 10):
        monkeypatch.setattr(torch.Tensor, "__matmul__", rounded(bits))
        assert not products._exact()


def test_inside_products_are_as_exact_as_outside() -> None:
    with fast_products():
        assert products._exact()
