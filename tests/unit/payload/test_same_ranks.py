"""Which rank has other parameters: from the ranks' checksums."""

import pytest
import torch

from jobkit.errors import Exit, RanksDiffer
from jobkit.payload import leaving
from jobkit.payload.guard.same_ranks import checksums, first_apart


@pytest.mark.parametrize(
    ("keys", "sums", "found"),
    [
        ("aaaa", [7, 7, 7, 7], None),
        ("aaaa", [7, 7, 8, 9], (2, 0)),
        ("aaaa", [6, 7, 7, 7], (0, 1)),  # most ranks have another
        ("aa", [7, 8], (1, 0)),
        ("abab", [7, 8, 7, 8], None),  # two stages: each differs from the other
        ("abab", [7, 8, 7, 9], (3, 1)),
        ("abcd", [1, 2, 3, 4], None),  # shards: each is on one rank only
    ],
)
def test_the_first_rank_that_differs(
    keys: str, sums: list[int], found: tuple[int, int] | None
) -> None:
    assert first_apart(list(keys), sums) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_changes_a_checksum_and_the_memory_format_does_not(dtype: torch.dtype) -> None:
    plain = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    last = plain.to(memory_format=torch.channels_last)
    assert checksums([plain, plain]).tolist() == checksums([last, last]).tolist()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    other = plain.clone()
    other.view(bits)[1, 2, 3, 4] ^= 1
    first, second = checksums([plain, other]).tolist()
    assert first != second


def test_it_ends_with_4_in_one_line_per_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(leaving, "leave", lambda code: codes.append(code) or exit(code))
    with pytest.raises(SystemExit):
        leaving.leave_after(RanksDiffer("rank 1 differs"), 3)
    assert codes == [Exit.THRESHOLD]
    assert capsys.readouterr().err == "[rank3] rank 1 differs\n"
