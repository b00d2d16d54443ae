"""Tables by columns: many names cost no more than those that become columns."""

from jobkit.analysis.tables.frames import MOST_OTHERS, below_each_other, cells_of, frame


def test_rows_with_a_name_each_keep_the_first_names_and_tell_the_others() -> None:
    rows = [{"epoch": n, f"m{n:05}": n} for n in range(2000)]
    count, columns, left = cells_of(rows, {"epoch"})
    assert count == 2000 and len(columns) == 1 + MOST_OTHERS and len(left) == 2000 - MOST_OTHERS
    assert columns["epoch"] == list(range(2000)) and columns["m00007"][7:9] == [7, None]


def test_of_several_runs_the_same_names_are_kept_as_of_one() -> None:
    rows = [{"epoch": n, f"m{n * 7 % 1000:05}": n} for n in range(1000)]
    parts = [cells_of(rows[i : i + 300], {"epoch"}) for i in range(0, 1000, 300)]
    whole, joined = cells_of(rows, {"epoch"}), below_each_other(parts, {"epoch"})
    assert sorted(joined[1]) == sorted(whole[1]) and sorted(joined[2]) == sorted(whole[2])
    assert all(joined[1][name] == whole[1][name] for name in whole[1])


def test_a_row_without_a_name_of_others_has_none() -> None:
    parts = [cells_of([{"a": 1}]), cells_of([]), cells_of([{}, {"b": 2}])]
    assert below_each_other(parts, ()) == [3, {"a": [1, None, None], "b": [None, None, 2]}, []]


def test_whole_numbers_of_others_stay_whole() -> None:
    rows = [{"id": 12345678901234567, "n": -3, "x": 1}, {"id": None, "n": 4, "x": 2.5}, {}]
    assert frame(rows, ()).to_csv(index=False).splitlines() == [
        "id,n,x",
        "12345678901234567,-3,1.0",
        ",4,2.5",
        ",,",
    ]
    # What 64 bits do not hold is empty, as elsewhere.
    assert frame([{"id": 2**63}, {"id": 1 - 2**63}], ())["id"].to_list()[1] == 1 - 2**63
    assert frame([{"id": 2**63}, {"id": 1}], ())["id"].isna().to_list() == [True, False]
