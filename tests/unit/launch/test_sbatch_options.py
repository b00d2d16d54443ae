"""Options of sbatch that a site and a run's size give: what would start another job than meant."""

from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch.site import Site
from jobkit.launch.slurm.options import Shape, output_file, sbatch_options


def test_a_node_takes_no_more_ranks_than_it_has_gpus() -> None:
    site = Site(name="here", gpus_per_node=4)
    assert sbatch_options(Shape(2, 4), site, {}, "s")["gpus-per-node"] == "4"
    with pytest.raises(UsageError, match=r"8 GPUs on a node: site 'here' has 4; .*--gpus 16"):
        sbatch_options(Shape(2, 8), site, {}, "s")


def test_slurm_replaces_nothing_in_the_path_of_a_log() -> None:
    assert output_file(Path("/logs/100%j/train.log")) == "/logs/100%%j/train.log"
