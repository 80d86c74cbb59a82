"""What launchers tell a process of its place among the others: torchrun, Open MPI's mpirun, Slurm's srun.

It is read from the environment; nobody is asked. Launchers nest: torchrun runs as a task of Slurm, mpirun has Slurm
start its daemons. The inner one's word then holds, and the outer one's of where to meet if that is left out.
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
"""What torchrun sets. Others' variables are translated to these."""
_PLACE = _NAMES[:4]
_PORTS = range(61440, 65536)
"""Above those that Linux gives to whoever connects."""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launched:
    """A process's place among those of its run. Without a launcher it is the only one."""

    launcher: str | None = None
    """Who started the ranks: ``"torchrun"`` (or whoever sets its variables), ``"Open MPI"`` or ``"Slurm"``."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its place among the ranks on this machine."""
    local_world_size: int = 1
    address: str | None = None
    """The machine of rank 0, where all meet; None: the launcher does not tell."""
    port: int | None = None

    @classmethod
    def read(cls, environ: Environment = os.environ) -> Self:
        """As the environment says.

        Raises:
            ConfigError: a part of what belongs together is missing or makes no sense.
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
        """Whether some of the ranks run on another machine."""
        return self.world_size > self.local_world_size

    def meeting_point(self) -> tuple[str, int]:
        """Where rank 0 listens for the others: its machine and a port.

        Raises:
            ConfigError: the launcher does not tell.
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
        """What torchrun would have set, which most libraries read."""
        address, port = self.meeting_point()
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, address, port)
        return dict(zip(_NAMES, map(str, values), strict=True))


def warn_if_launched(remedy: str, environ: Environment = os.environ) -> None:
    """Of a process that trains alone: warn where a launcher started it as one of several."""
    try:
        launched = Launched.read(environ)
    except ConfigError:  # a variable that is left over from something else
        return
    if launched.world_size > 1:
        UserLine.now().warn(
            ConfigWarning(
                f"{launched.launcher} started {launched.world_size} processes, and each trains alone, with states of "
                f"its own: this one has not joined the others; expected {remedy}"
            )
        )


def local_processes(environ: Environment = os.environ) -> int:
    """Processes on this machine that a launcher started together; 1 where none says so."""
    return _started_here(environ)[1]


def granted_cpus(environ: Environment = os.environ) -> int | None:
    """Processors that a Slurm task was given (``--cpus-per-task``), bound to them or not; None: it does not say."""
    return _slurm_cpus(environ, "SLURM_CPUS_PER_TASK")


def share_of_cpus(cpus: int, environ: Environment = os.environ) -> int:
    """A rank's share of the processors that its process may use: at least 1.

    Most launchers leave it to the ranks of a machine to share what all of them see. Slurm says what it gave them
    together, and may have bound each to a part of that, which is then its own.
    """
    launcher, ranks = _started_here(environ)
    together = _slurm_cpus(environ, "SLURM_CPUS_ON_NODE") if launcher == "Slurm" else None
    return max(1, min(cpus, (together or cpus) // ranks))


def first_host(hosts: str) -> str:
    """The first of a list of hosts as Slurm writes it: ``rack1n03`` of ``rack[1-2]n[03-05,9],login``.

    Raises:
        ConfigError: it is no such list.
    """
    first = re.match(r"(?:[^][,\s]|\[[^][]+\])+(?=,|$)", hosts)
    if first is None:
        raise ConfigError(f"got {hosts!r} for a list of hosts; expected one as Slurm writes it, like node[01-03,07]")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def _started_here(environ: Environment) -> tuple[str | None, int]:
    """Who started the ranks, and how many on this machine; what makes no sense is left to those who join them."""
    try:
        launcher, said = _said(environ)
        return launcher, _integer(said, LOCAL_WORLD_SIZE, least=1)
    except (KeyError, ConfigError):
        return None, 1


def _said(environ: Environment) -> tuple[str | None, dict[str, str]]:
    """Who started the ranks, and what torchrun's variables are or would be."""
    launchers = {"torchrun": _torchrun(environ), "Open MPI": _open_mpi(environ), "Slurm": _slurm(environ)}
    inner = next((said for said in launchers.values() if {RANK, WORLD_SIZE} & said.keys()), None)
    if inner is None:
        return None, launchers["torchrun"]
    place = {name: inner[name] for name in _PLACE if name in inner}
    # Who joins under Slurm or Open MPI sets torchrun's variables as well: they repeat the launcher's own.
    launcher = next(name for name, outer in reversed(launchers.items()) if place.items() <= outer.items())
    places = reversed(launchers.values())
    meeting_point = {name: value for said in places for name, value in said.items() if name not in _PLACE}
    return launcher, launchers[launcher] | meeting_point


def _torchrun(environ: Environment) -> dict[str, str]:
    return {name: environ[name] for name in _NAMES if environ.get(name)}


def _open_mpi(environ: Environment) -> dict[str, str]:
    names = dict(zip(_NAMES, ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), strict=False))
    said = {name: environ.get(f"OMPI_COMM_WORLD_{theirs}") for name, theirs in names.items()}
    return {name: value for name, value in said.items() if value}


def _slurm(environ: Environment) -> dict[str, str]:
    """Of a step's task alone: the batch script has some of these variables too, and is none.

    Rank 0 is on the first machine of the step. (``SLURM_LAUNCH_NODE_IPADDR`` is where srun was called, which may be
    another.) The port is the job's and the step's own, so that jobs that share a machine do not meet.
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
    """Whether srun started it, or what it is part of. Open MPI's daemons are tasks, too, but of a step of all machines
    except that of mpirun: what is said of the step is not of its ranks."""
    return bool(environ.get("SLURM_STEP_ID")) and not environ.get("OMPI_COMM_WORLD_RANK")


def _slurm_local_tasks(environ: Environment) -> str | None:
    """Of lists like ``2(x3),1``, which has machines with 2, 2, 2 and 1 tasks."""
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
            f"this process is the batch script of a Slurm job of {tasks} tasks, and none of them; expected it to be "
            "started by srun (srun --ntasks=1 where one process is meant) or by torchrun"
        )


def _integer(said: Environment, name: str, *, least: int = 0, most: int | None = None) -> int:
    text = said[name]
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}: got {text!r} from the environment, expected an integer {bounds}")
    return int(text)
