"""hpc/completion.bash, made from the parsers; `make docs` writes it, a test compares it."""

import argparse
import re
from collections.abc import Iterator

from jobkit.spec.runspec import DATASETS, MODELS, STRATEGIES
from support.parsers import COMMANDS, MINICLUSTER, OWN_OF_RUN_SH, RUN_SH, of_command, parser_of
from support.place import ROOT

FILE = ROOT / "hpc" / "completion.bash"
TEMPLATE = """\
# Completion of options and values for bash and zsh, made from the parsers by `make docs`.
#
#   source hpc/completion.bash                                        bash
#   autoload -U bashcompinit && bashcompinit; source hpc/completion.bash      zsh (after compinit)
#
# It starts no program. What another completion serves already (sbatch's) is left to it.

# The options of a command.
_jobkit_options() {
  case $1 in
@OPTIONS@
  esac
}

# The values of an option that takes one of a few, or the commands of a program.
_jobkit_values() {
  case $1 in
@VALUES@
  esac
}

# The command that a line calls, from the words before the one that is completed.
_jobkit_command() {
  local command='' word
  for word in "$@"; do
    case ${word##*/} in
      run.sh) command=run.sh ;;
      comm.sh) command='comm' ;;
      run_benchmarks.py) command=run ;;
      collect_results.py) command=collect ;;
      plot_results.py | plot_results.sh) command=plot ;;
      jobkit | minicluster) command=${word##*/} ;;
      [a-z]*) [[ $command != jobkit && $command != minicluster ]] || command="$command $word" ;;
    esac
  done
  echo "${command#jobkit }"
}

# The names of what there is: of studies that were planned, or of files in a folder.
_jobkit_names() {
  local path
  for path in "$1"/*"$2"; do
    [[ ! -e $path ]] || { path=${path%"$2"}; echo "${path##*/}"; }
  done
}

# What may stand where the cursor is. $1: the command; $2: the word there; $3: the word before;
# $4: the last option before.
_jobkit_words() {
  case $3 in
    --study) _jobkit_names hpc/studies .toml; return ;;
    --site) _jobkit_names hpc/sites .toml; return ;;
  esac
  case $2,$3 in
    -*) _jobkit_options "$1" ;;
    *,-*) _jobkit_values "$1 $3" ;;
    *)
      _jobkit_values "$1 $4 ..." # an option of several values
      _jobkit_values "$1"
      case $1 in
        status | cancel | collect | plot | step-model)
          _jobkit_names "${JOBKIT_LOGS:-logs}" /plan.json ;;
      esac ;;
  esac
}

_jobkit() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} last='' each command
  [[ $word != = ]] || word=''
  [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD - 2]} # --option=value
  for each in "${COMP_WORDS[@]:0:$COMP_CWORD}"; do
    [[ $each != -* ]] || last=$each
  done
  command=$(_jobkit_command "${COMP_WORDS[@]:0:$COMP_CWORD}")
  COMPREPLY=()
  # shellcheck disable=SC2207 # every word is a plain one
  [[ -z $command ]] ||
    COMPREPLY=($(compgen -W "$(_jobkit_words "$command" "$word" "$before" "$last")" -- "$word"))
}

# Files are offered where there is nothing else.
complete -o bashdefault -o default -F _jobkit jobkit run.sh run_benchmarks.py collect_results.py \\
  plot_results.py plot_results.sh minicluster
for _jobkit_program in python python3 bash sbatch; do
  [[ -z ${ZSH_VERSION-} ]] || break # it has its own for them
  ! declare -F _completion_loader >/dev/null || _completion_loader "$_jobkit_program" || :
  complete -p "$_jobkit_program" >/dev/null 2>&1 ||
    complete -o bashdefault -o default -F _jobkit "$_jobkit_program"
done
unset _jobkit_program
"""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command as the completion calls it, and its parser."""
    yield "run.sh", parser_of(*RUN_SH)
    for name in COMMANDS:
        yield name, of_command(name)
    of_minicluster = parser_of(*MINICLUSTER)
    yield "minicluster", of_minicluster
    for name, parser in subcommands(of_minicluster).items():
        yield f"minicluster {name}", parser


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a program's commands."""
    found = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: each for action in found for name, each in action.choices.items()}


def visible(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The actions that --help shows."""
    return [a for a in parser._actions if a.help != argparse.SUPPRESS]


def values(action: argparse.Action) -> list[str]:
    """What an option may be, where that is one of a few words."""
    known = {"--strategies": STRATEGIES, "--model": MODELS, "--dataset": DATASETS}
    for option in action.option_strings:
        if option in known:
            return list(known[option])
    if action.choices:
        return [str(choice) for choice in action.choices]
    text = action.metavar if isinstance(action.metavar, str) else ""
    return text.split("|") if re.fullmatch(r"\w+(\|\w+)+", text) else []


def script() -> str:
    """The completion as a text."""
    offered, chosen = [], [("jobkit", list(COMMANDS))]
    for command, parser in parsers():
        own = sorted(OWN_OF_RUN_SH) if command == "run.sh" else []
        options = [o for a in visible(parser) for o in a.option_strings if o.startswith("--")]
        offered.append((command, [*own, *options]))
        if commands := subcommands(parser):
            chosen.append((command, list(commands)))
        for action in visible(parser):
            if action.option_strings and (words := values(action)):
                keys = [f"{command} {option}" for option in action.option_strings]
                several = [f"{key} ..." for key in keys] if action.nargs in ("+", "*") else []
                chosen += [(key, words) for key in (*keys, *several)]
    text = TEMPLATE.replace("@OPTIONS@", cases(offered))
    return text.replace("@VALUES@", cases(chosen))


def cases(rows: list[tuple[str, list[str]]]) -> str:
    """The branches of a case in shell."""
    return "\n".join(f"    '{key}') echo '{' '.join(words)}' ;;" for key, words in rows)


if __name__ == "__main__":
    FILE.write_text(script())
