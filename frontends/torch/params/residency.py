"""The residency of each tensor that an engine moves: one table of its states and of the allowed moves.

A read of a tensor that is not RESIDENT first calls ``ManagedTensor.wait``, a function that the last move has set. This
function waits, gathers or raises. For released tensors it is ``DeviceMemory.await_values``, which raises as long as
``Health.released`` has a message. ``restore()`` first clears that message, and then moves the tensors to WRITING.

===========  =========================  ===============================================  ==============================
state        values on the device       a reader                                         where it is recorded
===========  =========================  ===============================================  ==============================
RESIDENT     of the last finished step  reads                                            the tensor has its own class
WRITING      are on their way: an       waits for this one tensor                        in its ``ManagedTensor``
             update, or a restore
SPECULATIVE  of a step that has not     on one rank recalls the values and waits; on     as WRITING, and its
             come                       several ranks is an error                        bucket's publication is EARLY
SHARDED      none                       gathers the tensor in forward, backward and      in its ``ManagedTensor``
                                        ``init()``; elsewhere is an error
UNSHARDED    whole for a while          reads                                            as RESIDENT; ``holds`` of its
                                                                                         ``PartitionedParam`` is not 0
RELEASED     none                       is an error                                      in its ``ManagedTensor``
===========  =========================  ===============================================  ==============================

These methods move a tensor: ``LocalElements.have_readers_wait`` (UPDATE), ``DeviceMemory.release`` and ``restore``,
``WholeParameters.guard`` and ``InitShards.release`` (SHARD), and code that has waited for the tensor or gathered it
(ARRIVE). Each calls the function of ``pending.py`` with the event's name. Only ``pending.py`` changes a tensor's class
and uses this table. Parameters of stage 3 stay SHARDED in a release: their shards leave the device.
"""

from offload_core.support.state_machine import Named


class Residency(Named):
    RESIDENT = "resident"
    WRITING = "being written"
    SHARDED = "in shards"
    RELEASED = "released"


class ResidencyEvent(Named):
    UPDATE = "update"
    RELEASE = "release"
    RESTORE = "restore"
    SHARD = "shard"
    ARRIVE = "arrive"


R, RE = Residency, ResidencyEvent
RESIDENCY: dict[tuple[Residency, ResidencyEvent], Residency] = {
    (R.RESIDENT, RE.UPDATE): R.WRITING,
    (R.WRITING, RE.UPDATE): R.WRITING,
    (R.RESIDENT, RE.RELEASE): R.RELEASED,
    (R.WRITING, RE.RELEASE): R.RELEASED,  # another engine that uses the tensor is still restoring it
    (R.RELEASED, RE.RELEASE): R.RELEASED,  # by another engine that uses the tensor
    (R.RELEASED, RE.RESTORE): R.WRITING,
    (R.RESIDENT, RE.SHARD): R.SHARDED,
    (R.SHARDED, RE.SHARD): R.SHARDED,
    **{(state, RE.ARRIVE): R.RESIDENT for state in R},  # the tensor's wait has returned: it has values
}
