"""A process's rank, as its launcher put it into the environment: torchrun, DeepSpeed's, Open MPI's mpirun or Slurm's
srun.

Launchers nest: torchrun may run as a task of Slurm, and mpirun may have Slurm start its daemons. The ranks of the
innermost launcher hold. The meeting point comes from an outer one if the innermost does not give it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ..errors import ConfigError, ConfigWarning
from .user_line import UserLine

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
_NAMES = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
"""The variables that torchrun sets. Those of other launchers are translated to these."""
_PLACE = _NAMES[:4]
_LOCAL_SIZE = "LOCAL_SIZE"
_PORTS = range(61440, 65536)
"""Ports for the meeting point. They lie above the ports that Linux chooses for outgoing connections."""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launched:
    """A process's place among those of its run. Without a launcher it is the only one."""

    launcher: str | None = None
    """``"torchrun"`` (or anything that sets its variables), ``"Open MPI"`` or ``"Slurm"``; None: no launcher."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The rank's number among the ranks on this machine."""
    local_world_size: int = 1
    address: str | None = None
    """The machine of rank 0, to which all ranks connect; None: the launcher does not give it."""
    port: int | None = None

    @classmethod
    def read(cls, environ: Environment = os.environ) -> Self:
        """Read the environment.

        Raises:
            ConfigError: a variable is missing that others need, or a value makes no sense.
        """
        launcher, said = _said(environ)
        if launcher is None:
            _refuse_a_batch_script(environ)
            return cls()
        if missing := [name for name in (RANK, WORLD_SIZE) if name not in said]:
            given = ", ".join(f"{name}={said[name]}" for name in _NAMES if name in said)
            raise ConfigError(
                f"the environment has {given} and no {missing[0]}; expected both RANK and WORLD_SIZE, as torchrun sets "
                "them, or neither for a single process"
            )
        rank, world_size = _integer(said, RANK), _integer(said, WORLD_SIZE, least=1)
        local_rank = _integer(said, LOCAL_RANK) if LOCAL_RANK in said else 0
        local_world_size = _integer(said, LOCAL_WORLD_SIZE, least=1) if LOCAL_WORLD_SIZE in said else 1
        if not (rank < world_size and local_rank < local_world_size <= world_size and local_rank <= rank):
            raise ConfigError(
                f"the environment ({launcher}'s) has rank {rank} of {world_size}, on this machine rank {local_rank} of "
                f"{local_world_size}; expected ranks less than their number, and no more on this machine than in all: "
                f"check {', '.join(_PLACE)}"
            )
        port = _integer(said, MASTER_PORT, least=1, most=65535) if MASTER_PORT in said else None
        return cls(launcher, rank, world_size, local_rank, local_world_size, said.get(MASTER_ADDR), port)

    @property
    def several_machines(self) -> bool:
        """True if some of the ranks run on another machine."""
        return self.world_size > self.local_world_size

    def meeting_point(self) -> tuple[str, int]:
        """The machine and the port on which rank 0 listens for the others.

        Raises:
            ConfigError: the launcher does not give them.
        """
        if self.address is None or self.port is None:
            missing = MASTER_ADDR if self.address is None else MASTER_PORT
            raise ConfigError(
                f"{missing} is not set, and {self.launcher} does not tell; expected MASTER_ADDR (the machine of rank "
                "0) and MASTER_PORT (a free port there), the same in all processes: mpirun -x MASTER_ADDR=... "
                "-x MASTER_PORT=..., for one"
            )
        return self.address, self.port

    def variables(self) -> dict[str, str]:
        """The variables that torchrun would have set; most libraries read them."""
        address, port = self.meeting_point()
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, address, port)
        return dict(zip(_NAMES, map(str, values), strict=True))


def warn_if_launched(remedy: str, environ: Environment = os.environ) -> None:
    """Warn if this process trains alone although a launcher started it as one of several."""
    if said := _left_the_others(environ):
        UserLine.now().warn(ConfigWarning(f"{said}; expected {remedy}"))


def refuse_if_launched(remedy: str, environ: Environment = os.environ) -> None:
    """Raise :class:`ConfigError` if this process would train alone although a launcher started it as one of several."""
    if said := _left_the_others(environ):
        raise ConfigError(f"{said}; expected {remedy}")


def _left_the_others(environ: Environment) -> str:
    """Return a description of this process, which has joined no others, if a launcher started several; else empty."""
    try:
        launched = Launched.read(environ)
    except ConfigError:  # a variable that is left over from something else
        return ""
    if launched.world_size == 1:
        return ""
    return (
        f"{launched.launcher} started {launched.world_size} processes, and each trains alone, with separate states: "
        "this process has not joined the others"
    )


def local_processes(environ: Environment = os.environ) -> int:
    """Number of processes that a launcher started together on this machine; 1 without a launcher."""
    return _started_here(environ)[1]


def place_on_machine(environ: Environment = os.environ) -> tuple[int | None, int]:
    """This process's number among those that a launcher started on this machine, and how many these are.

    ``(0, 1)`` without a launcher; None for a number that is not given or makes no sense.
    """
    ranks = local_processes(environ)
    if ranks == 1:
        return 0, 1
    try:
        rank = _integer(_said(environ)[1], LOCAL_RANK)
    except (KeyError, ConfigError):
        return None, ranks
    return (rank if rank < ranks else None), ranks


def granted_cpus(environ: Environment = os.environ) -> int | None:
    """Processors that Slurm gave this task (``--cpus-per-task``), whether or not it bound the task to them; None:
    unknown."""
    return _slurm_cpus(environ, "SLURM_CPUS_PER_TASK")


def cpus_together(environ: Environment = os.environ) -> int | None:
    """Processors that Slurm gave all its tasks on this machine together; None: Slurm did not start this process."""
    return _slurm_cpus(environ, "SLURM_CPUS_ON_NODE") if _started_here(environ)[0] == "Slurm" else None


def share_of_cpus(cpus: int, environ: Environment = os.environ, *, together: int | None = None) -> int:
    """A rank's share of the ``cpus`` processors that its process may use: at least 1.

    With most launchers all ranks of a machine see the same processors and have to share them. Slurm gives the number
    for all ranks together, and may have bound each rank to its own part.

    Args:
        together: the processors of all ranks together, if Slurm does not give them; None: the processors that this
            rank sees.
    """
    return max(1, min(cpus, (cpus_together(environ) or together or cpus) // local_processes(environ)))


def first_host(hosts: str) -> str:
    """The first of a list of hosts as Slurm writes it: ``rack1n03`` of ``rack[1-2]n[03-05,9],login``.

    Raises:
        ConfigError: ``hosts`` is not such a list.
    """
    first = re.match(r"(?:[^][,\s]|\[[^][]+\])+(?=,|$)", hosts)
    if first is None:
        raise ConfigError(f"got {hosts!r} for a list of hosts; expected one as Slurm writes it, like node[01-03,07]")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def _started_here(environ: Environment) -> tuple[str | None, int]:
    """The launcher, and its number of ranks on this machine. Bad values count as no launcher: joining reports them."""
    try:
        launcher, said = _said(environ)
        return launcher, _integer(said, LOCAL_WORLD_SIZE, least=1)
    except (KeyError, ConfigError):
        return None, 1


def _said(environ: Environment) -> tuple[str | None, dict[str, str]]:
    """The launcher, and the values of torchrun's variables, translated where another launcher started the ranks."""
    launchers = {"torchrun": _torchrun(environ), "Open MPI": _open_mpi(environ), "Slurm": _slurm(environ)}
    inner = next((said for said in launchers.values() if {RANK, WORLD_SIZE} & said.keys()), None)
    if inner is None:
        return None, launchers["torchrun"]
    place = {name: inner[name] for name in _PLACE if name in inner}
    # Libraries that join ranks under Slurm or Open MPI set torchrun's variables too, to the launcher's own values.
    launcher = next(name for name, outer in reversed(launchers.items()) if place.items() <= outer.items())
    places = reversed(launchers.values())
    meeting_point = {name: value for said in places for name, value in said.items() if name not in _PLACE}
    return launcher, launchers[launcher] | meeting_point


def _torchrun(environ: Environment) -> dict[str, str]:
    """Return the variables of torchrun, or of DeepSpeed's launcher, which calls one of them ``LOCAL_SIZE``."""
    said = {name: environ[name] for name in _NAMES if environ.get(name)}
    ranks, here = said.get(WORLD_SIZE, ""), environ.get(_LOCAL_SIZE, "")
    if {RANK, LOCAL_RANK} <= said.keys() and here.isdecimal() and ranks.isdecimal() and int(here) <= int(ranks):
        said.setdefault(LOCAL_WORLD_SIZE, here)  # others use the name, too, for something else
    return said


def _open_mpi(environ: Environment) -> dict[str, str]:
    names = dict(zip(_NAMES, ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), strict=False))
    said = {name: environ.get(f"OMPI_COMM_WORLD_{theirs}") for name, theirs in names.items()}
    return {name: value for name, value in said.items() if value}


def _slurm(environ: Environment) -> dict[str, str]:
    """Slurm's variables of a step's task. The batch script has some of them too, but is not a task.

    Rank 0 is on the first machine of the step. (``SLURM_LAUNCH_NODE_IPADDR`` is the machine on which srun was called,
    which may be another.) The port follows from the job's and the step's number, so that jobs on one
    machine use different ports.
    """
    if not _is_slurm_task(environ):
        return {}

    def first_of(*names: str) -> str | None:
        return next((environ[name] for name in names if environ.get(name)), None)

    hosts = first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    said = {
        RANK: first_of("SLURM_PROCID"),
        # In a shell that salloc opened SLURM_NTASKS counts the tasks that are still to be started.
        WORLD_SIZE: first_of("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        LOCAL_RANK: first_of("SLURM_LOCALID"),
        LOCAL_WORLD_SIZE: _slurm_local_tasks(environ),
        MASTER_ADDR: first_host(hosts) if hosts else None,
    }
    if first_of("SLURM_JOB_ID"):
        number = _integer(environ, "SLURM_JOB_ID") + 1013 * _integer(environ, "SLURM_STEP_ID")
        said[MASTER_PORT] = str(_PORTS[number % len(_PORTS)])
    return {name: value for name, value in said.items() if value is not None}


def _is_slurm_task(environ: Environment) -> bool:
    """True if srun started this process or an ancestor of it. Open MPI's daemons are tasks too, but of a step that has
    every machine except mpirun's, so that the step's variables do not describe Open MPI's ranks."""
    return bool(environ.get("SLURM_STEP_ID")) and not environ.get("OMPI_COMM_WORLD_RANK")


def _slurm_local_tasks(environ: Environment) -> str | None:
    """Tasks on this machine, from a list like ``2(x3),1``: machines with 2, 2, 2 and 1 tasks."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not counts or not environ.get("SLURM_NODEID"):
        return environ.get("SLURM_NTASKS_PER_NODE")
    node = _integer(environ, "SLURM_NODEID")
    for tasks, _, machines in re.findall(r"(\d+)(\(x(\d+)\))?(?:,|$)", counts):
        node -= int(machines or 1)
        if node < 0:
            return str(tasks)
    raise ConfigError(
        f"SLURM_STEP_TASKS_PER_NODE: got {counts!r} for machine {environ['SLURM_NODEID']}; expected a list that has it,"
        " like 2(x3),1"
    )


def _slurm_cpus(environ: Environment, name: str) -> int | None:
    cpus = environ.get(name, "") if _is_slurm_task(environ) else ""
    return int(cpus) if cpus.isdecimal() and int(cpus) else None


def _refuse_a_batch_script(environ: Environment) -> None:
    tasks = environ.get("SLURM_NTASKS", "")
    if environ.get("SLURM_PROCID") and tasks.isdecimal() and int(tasks) > 1:
        raise ConfigError(
            f"this process is the batch script of a Slurm job of {tasks} tasks, not a task; expected it to be "
            "started by srun (srun --ntasks=1 where one process is meant) or by torchrun"
        )


def _integer(said: Environment, name: str, *, least: int = 0, most: int | None = None) -> int:
    text = said[name]
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}: got {text!r} from the environment, expected an integer {bounds}")
    return int(text)
