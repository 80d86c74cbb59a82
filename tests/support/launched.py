"""Environment variables that launchers set in a process, and the run over two hosts that Slurm launches."""

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7001",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[03,05-07]",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
"""As srun sets it for the last of 2 x 2 tasks."""
BATCH = {
    "SLURM_JOB_ID": "7001",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[01-02]",
}
"""As sbatch sets it for the script itself."""

STEPS, SAVED, CUT = 4, 2, 3
"""Steps of a run, how many it has done when it saves, and the one in the middle of which the network goes."""
