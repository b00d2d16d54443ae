"""`python -m jobkit check-k8s`: finds mistakes in manifests, without a cluster."""

from argparse import ArgumentParser
from collections.abc import Sequence

from jobkit.errors import Parser, command
from jobkit.launch.findings import add_file_arguments, report
from jobkit.launch.kubernetes.check import check

EXAMPLES = """examples:
  python run_benchmarks.py --study strong --to kubernetes --image registry.example.org/jobkit:1.0
  python -m jobkit check-k8s logs/strong/kubernetes/*.yaml
  python -m jobkit check-k8s train.yaml --json

exit codes: 0 no error (warnings are no error); 2 an error in a file, or no such file"""


def parser() -> ArgumentParser:
    """The command line of check-k8s."""
    made = Parser(
        prog="jobkit check-k8s",
        description="Check that the pods of a Job become the ranks of one training; all else is "
        "for kubectl apply --dry-run=server.",
        epilog=EXAMPLES,
    )
    add_file_arguments(made, "a file of manifests, in YAML or JSON")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check the files and print the findings; 2 where one is an error."""
    return report(parser().parse_args(argv), check)
