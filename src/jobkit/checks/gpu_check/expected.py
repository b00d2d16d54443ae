"""What a number measured on a GPU is expected to be, and why: bounds by kind of GPU and of link.

Sources: dense peaks and memory of the data sheets, as collected with their links in
https://github.com/stas00/ml-engineering (compute/accelerator, revision 0074473); links:
https://www.nvidia.com/en-us/data-center/nvlink/ (A100: 12 links, 600 GB/s; H100: 18 links, 900
GB/s, both directions together); busbw against the speed of a link:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import math
import re
from dataclasses import dataclass

LEAST_SHARE = 0.5  # chosen: half of a peak that is never reached in practice
MOST_SHARE = 1.05  # what exceeds a peak by more was timed, or computed, otherwise than it says
_LEAST_OF_LINKS = 0.4  # chosen: two GPUs of many reach less of their links than all of them
_GB_PER_LINK = {"B200": 50.0}  # one direction; others of NVLink 3 and 4 have 25
_LEAST_PCIE_GB = 2.0  # chosen: a sixth of what PCIe 3.0 x16 carries, 15.75 GB/s in one direction


@dataclass(frozen=True)
class Measure:
    """A measured number beside what is expected of it. None: not measured, or no bound is known."""

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    why: str = ""  # the reason for the bounds, or why there is no value

    @property
    def verdict(self) -> str:
        """Return pass, FAIL, not measured, or recorded where there is no bound."""
        if self.value is None or math.isnan(self.value):
            return "not measured"
        if self.least is None and self.most is None:
            return "recorded"
        low, high = self.least is None or self.value >= self.least, self.most is None
        return "pass" if low and (high or self.value <= (self.most or 0.0)) else "FAIL"

    @property
    def expected(self) -> str:
        """Return the bounds for people."""
        if self.least is not None and self.most is not None:
            if self.least == self.most:
                return f"{self.least:g}"
            return f"{self.least:.4g} to {self.most:.4g}"
        if self.least is not None:
            return f"at least {self.least:.4g}"
        return f"at most {self.most:.4g}" if self.most is not None else "-"


@dataclass(frozen=True)
class Peak:
    """Dense peaks of a GPU: TFLOP/s by arithmetic, and GB/s of its memory."""

    fp32: float
    tf32: float | None
    bf16: float
    memory_gb_per_s: float


_H100 = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0}
# By what torch calls the GPU; the first that is found in it counts.
PEAKS = {
    r"B200": Peak(fp32=75.0, tf32=1125.0, bf16=2250.0, memory_gb_per_s=8000),
    r"GH200 (480|120)GB": Peak(**_H100, memory_gb_per_s=4000),
    r"GH200": Peak(**_H100, memory_gb_per_s=4900),
    r"H200": Peak(**_H100, memory_gb_per_s=4800),
    r"H100 PCIe": Peak(fp32=51.0, tf32=378.0, bf16=756.0, memory_gb_per_s=2000),
    r"H100 80GB": Peak(**_H100, memory_gb_per_s=3350),
    r"A100.*80GB": Peak(fp32=19.5, tf32=156.0, bf16=312.0, memory_gb_per_s=2039),
    r"A100": Peak(fp32=19.5, tf32=156.0, bf16=312.0, memory_gb_per_s=1555),
    r"L40S": Peak(fp32=91.6, tf32=183.0, bf16=362.0, memory_gb_per_s=864),
    r"MI300X": Peak(fp32=163.4, tf32=653.7, bf16=1307.0, memory_gb_per_s=5300),
    # One of the two dies, each of which is a device.
    r"MI250X": Peak(fp32=23.95, tf32=None, bf16=191.5, memory_gb_per_s=1638),
}


def peak_of(gpu: str) -> Peak | None:
    """Return the peaks of a GPU by its name; None where they are not known here."""
    return next((peak for name, peak in PEAKS.items() if re.search(name, gpu)), None)


def product(kind: str, tflops: float | None, gpu: str) -> Measure:
    """Return the measured rate of a large matrix product beside its bounds; kind: fp32 and so."""
    peak = getattr(peak_of(gpu), kind, None)
    return _of_peak(f"matrix product, {kind}", tflops, "TFLOP/s", peak, gpu)


def memory(gb_per_s: float | None, gpu: str) -> Measure:
    """Return the measured rate of a copy in the GPU's memory, read and written, with its bounds."""
    peak = peak_of(gpu)
    most = peak.memory_gb_per_s if peak else None
    return _of_peak("copy in memory", gb_per_s, "GB/s", most, gpu)


def _of_peak(name: str, value: float | None, unit: str, peak: float | None, gpu: str) -> Measure:
    if peak is None:
        return Measure(name, value, unit, why=f"no data sheet of '{gpu}' in the table")
    why = f"{LEAST_SHARE:.0%} to {MOST_SHARE:.0%} of the data sheet's {peak:g}: less is a limit of "
    why += "power or clock or another user, more another arithmetic or a wrong time"
    return Measure(name, value, unit, LEAST_SHARE * peak, MOST_SHARE * peak, why)


def all_reduce(gb_per_s: float | None, gpu: str, link: str) -> Measure:
    """Return the busbw of a large all_reduce beside its bound; link: a word of nvidia-smi topo."""
    name = "busbw of the largest all_reduce"
    if links := re.fullmatch(r"NV(\d+)", link):
        one = next((gb for word, gb in _GB_PER_LINK.items() if word in gpu), 25.0)
        way = int(links[1]) * one
        why = f"{_LEAST_OF_LINKS:.0%} of {links[1]} NVLinks of {one:g} GB/s in one direction"
        return Measure(name, gb_per_s, "GB/s", _LEAST_OF_LINKS * way, None, why)
    if link in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        why = f"over PCIe or the host's memory ({link}); less is a copy by way of TCP"
        return Measure(name, gb_per_s, "GB/s", _LEAST_PCIE_GB, None, why)
    return Measure(name, gb_per_s, "GB/s", why="the link between the GPUs is not known")
