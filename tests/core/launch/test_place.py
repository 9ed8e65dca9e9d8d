"""Who am I: a pure function of --nproc and the environment, contradictions named on both sides."""

import pytest

from core.launch.place import PARENT, LaunchError, find_place
from core.launch.slurm import default_port, expand_nodelist, expand_tasks

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r7",
}
BATCH = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
STEP = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_a_single_process_needs_nothing() -> None:
    place = find_place(None, {})
    assert (place.rank, place.size, place.children, place.rule) == (0, 1, 0, "one process")


def test_torchrun_is_taken_at_its_word() -> None:
    place = find_place(None, TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.master_addr, place.master_port, place.rule) == ("n1", 29500, "torchrun")
    assert place.run == "r7"


def test_a_launcher_of_ones_own_may_leave_the_local_names_out() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
    place = find_place(None, environ)
    assert (place.local_rank, place.local_size) == (1, 2)


def test_an_srun_task_finds_everything_in_its_step() -> None:
    place = find_place(None, STEP)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.master_addr, place.master_port) == ("n1", default_port(812, 2))
    assert place.rule == "srun, step 812.2"
    assert [place.node_of(rank) for rank in range(5)] == ["n1", "n1", "n2", "n2", ""]


def test_master_addr_and_port_win_over_the_step() -> None:
    place = find_place(None, {**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (place.master_addr, place.master_port) == ("head", 1234)


def test_two_steps_of_a_job_and_two_jobs_have_ports_of_their_own() -> None:
    """C087: two starts on one node fought for a port."""
    ports = {default_port(job, step) for job in range(800, 900) for step in range(3)}
    assert len(ports) == 300
    assert min(ports) >= 20000 and max(ports) < 30000  # below the usual ephemeral range


def test_hand_made_slurm_variables_do() -> None:
    """C085: two shells with these and nothing else."""
    environ = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "localhost",
    }
    place = find_place(None, environ)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert place.master_addr == "localhost"


def test_a_cyclic_distribution_leaves_nodes_unnamed() -> None:
    assert find_place(None, {**STEP, "SLURM_DISTRIBUTION": "cyclic"}).node_of(3) == ""


def test_nproc_makes_a_parent() -> None:
    assert find_place("4", {}).children == 4
    assert find_place("gpu", {}).children == -1
    assert find_place("4", {}).rule == "--nproc 4"
    one_node = {**BATCH, "SLURM_NNODES": "1"}
    assert find_place("4", one_node).children == 4


def test_a_rank_of_the_parent_has_the_same_command_line() -> None:
    place = find_place("8", {**TORCHRUN, PARENT: "17"})
    assert (place.children, place.rank, place.rule) == (0, 5, "--nproc 8")


def test_srun_of_one_task_is_one_process() -> None:
    assert find_place(None, {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).size == 1


def test_srun_of_one_torchrun_a_node_is_fine() -> None:
    environ = {**STEP, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert find_place(None, environ).rule == "torchrun"


@pytest.mark.parametrize(
    ("nproc", "environ", "both_sides"),
    [
        (None, {"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not"]),
        (None, {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK is not"]),
        (None, {**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        (None, {**TORCHRUN, "RANK": "one"}, ["RANK=one"]),
        (None, {**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (None, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, ["MASTER_PORT"]),
        ("2", TORCHRUN, ["--nproc 2", "RANK=5", "WORLD_SIZE=8"]),
        ("2", {"RANK": "0", "WORLD_SIZE": "2"}, ["--nproc 2", "RANK=0", "WORLD_SIZE=2"]),
        ("2", STEP, ["--nproc 2", "4 tasks"]),
        ("2", BATCH, ["--nproc 2", "SLURM_NTASKS=4", "several nodes"]),
        ("2", {**BATCH, "SLURM_NNODES": "1"}, ["--nproc 2", "SLURM_NTASKS=4"]),
        ("0", {}, ["--nproc 0"]),
        ("all", {}, ["--nproc all"]),
        (None, {**STEP, "SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "4 tasks"]),
        (None, {**STEP, "SLURM_STEP_NODELIST": "n[1-"}, ["n[1-"]),
        (None, {"OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun", "RANK"]),
    ],
)
def test_contradictions_name_both_sides(nproc, environ, both_sides) -> None:
    with pytest.raises(LaunchError) as caught:
        find_place(nproc, environ)
    for side in both_sides:
        assert side in str(caught.value)


def test_a_batch_script_that_forgot_srun_is_told_so() -> None:
    """It has SLURM_PROCID=0 and SLURM_NTASKS=4 as well, and would wait for ranks 1 to 3."""
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS=4.*not started by srun"):
        find_place(None, BATCH)


def test_an_interactive_shell_is_no_task() -> None:
    shell = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}
    with pytest.raises(LaunchError, match="not started by srun"):
        find_place(None, shell)


def test_torchrun_inside_every_task_is_explained() -> None:
    environ = {**TORCHRUN, **STEP, "SLURM_STEP_NUM_TASKS": "8", "RANK": "0", "WORLD_SIZE": "4"}
    with pytest.raises(LaunchError, match="torchrun runs inside each of srun's 8 tasks"):
        find_place(None, environ)


def test_slurm_with_other_numbers_than_the_launcher() -> None:
    environ = {**TORCHRUN, **BATCH, "SLURM_NTASKS": "3"}
    with pytest.raises(LaunchError, match=r"WORLD_SIZE=8.*contradicts SLURM_NTASKS=3"):
        find_place(None, environ)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", ["localhost"]),
        ("n[01-03,7],m5", ["n01", "n02", "n03", "n7", "m5"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_node_lists(text, names) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n[a-b]", "n[1-2"])
def test_what_is_no_node_list(text) -> None:
    with pytest.raises(ValueError, match="is not a SLURM node list"):
        expand_nodelist(text)


def test_tasks_per_node() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="tasks per node"):
        expand_tasks("2x3")
