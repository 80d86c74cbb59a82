"""The eight ways in which an engine runs, for laws that hold in each."""

from tests.support.late_stores import STATES_ON_DISK

STAGE_3 = {"stage": 3, "offload_param": "cpu", "param_persistence_threshold": 0}
WAYS = {
    "stage 1": {"stage": 1},
    "stage 2": {},
    "serial": {"schedule": "serial"},
    "in backward": {"update_in_backward": True},
    "stage 3": STAGE_3,
    "stage 3, nothing live": {**STAGE_3, "max_live_parameters": 1, "prefetch_bucket_size": 0},
    "stage 3, on disk": {**STAGE_3, **STATES_ON_DISK, "offload_param": "nvme"},
    "stage 3, in backward": {**STAGE_3, "update_in_backward": True},
}
