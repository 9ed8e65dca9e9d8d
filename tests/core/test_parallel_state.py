"""The default grid and Megatron's questions about it, against the rank arithmetic of core.grid."""

import pytest
import torch
import torch.distributed as dist

from core import parallel_state as ps
from core.comm import Group
from core.grid import RankGrid
from core.process_grid import ProcessGrid
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def no_grid():
    ps.destroy_model_parallel()
    yield
    ps.destroy_model_parallel()


def answers(world, sizes, order):
    """What every rank says about its groups."""
    ps.initialize_model_parallel(**sizes, order=order)
    ranks_of = dist.get_process_group_ranks
    return {
        "tp": ranks_of(ps.get_tensor_model_parallel_group()),
        "pp": ranks_of(ps.get_pipeline_model_parallel_group()),
        "dp": ranks_of(ps.get_data_parallel_group()),
        "cp": ranks_of(ps.get_context_parallel_group()),
        "dp_cp": ranks_of(ps.get_data_parallel_group(with_context_parallel=True)),
        "tp_pp": ranks_of(ps.get_model_parallel_group()),
        "tp_dp": ranks_of(ps.get_tensor_and_data_parallel_group()),
        "tp_rank": ps.get_tensor_model_parallel_rank(),
        "pp_rank": ps.get_pipeline_model_parallel_rank(),
        "dp_rank": ps.get_data_parallel_rank(),
        "cp_rank": ps.get_context_parallel_rank(),
        "sizes": (
            ps.get_tensor_model_parallel_world_size(),
            ps.get_pipeline_model_parallel_world_size(),
            ps.get_data_parallel_world_size(),
            ps.get_context_parallel_world_size(),
        ),
        "src": (
            ps.get_tensor_model_parallel_src_rank(),
            ps.get_data_parallel_src_rank(),
            ps.get_pipeline_model_parallel_first_rank(),
            ps.get_pipeline_model_parallel_last_rank(),
            ps.get_model_parallel_src_rank(),
        ),
        "next": ps.get_pipeline_model_parallel_next_rank(),
        "prev": ps.get_pipeline_model_parallel_prev_rank(),
        "stage": (ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()),
        "embedding": (ps.is_rank_in_embedding_group(), ps.is_rank_in_position_embedding_group()),
    }


LAYOUTS = [(4, 1, 1), (2, 2, 1), (2, 1, 1), (1, 4, 1), (1, 1, 1), (1, 2, 2), (2, 1, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_answers_are_those_of_the_rank_arithmetic(
    ranks: RankPool, layout: tuple[int, int, int], order: str
) -> None:
    tp, pp, cp = layout
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
    }
    grid = RankGrid.fit(4, tp=tp, pp=pp, cp=cp, order=order)
    for rank, got in enumerate(ranks.run(answers, sizes, order, size=4)):
        here = grid.coord(rank)
        for name in ("tp", "pp", "dp", "cp", "dp_cp", "tp_pp", "tp_dp"):
            assert got[name] == list(grid.group_of(rank, *name.split("_")))
        for axis in ("tp", "pp", "dp", "cp"):
            assert got[f"{axis}_rank"] == getattr(here, axis)
        assert got["sizes"] == (tp, pp, grid.dp, cp)
        pipeline = grid.group_of(rank, "pp")
        assert got["src"] == (
            grid.group_of(rank, "tp")[0],
            grid.group_of(rank, "dp")[0],
            pipeline[0],
            pipeline[-1],
            grid.group_of(rank, "tp", "pp")[0],
        )
        assert got["next"] == pipeline[(here.pp + 1) % pp]
        assert got["prev"] == pipeline[(here.pp - 1) % pp]
        assert got["stage"] == (here.pp == 0, here.pp == pp - 1)
        assert got["embedding"] == (here.pp in (0, pp - 1), here.pp == 0)


def usable_groups(world):
    ps.initialize_model_parallel(2)
    groups = [
        ps.get_tensor_model_parallel_group(),
        ps.get_pipeline_model_parallel_group(),
        ps.get_context_parallel_group(),
        ps.get_embedding_group(),
        ps.get_position_embedding_group(),
        ps.get_expert_model_parallel_group(),
        ps.get_expert_tensor_parallel_group(),
        ps.get_expert_data_parallel_group(),
        ps.get_tensor_and_context_parallel_group(),
        ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
        ps.get_amax_reduction_group(),
        ps.get_amax_reduction_group(True, True),
        ps.get_data_parallel_group_gloo(),
        ps.get_model_parallel_group(),
    ]
    sums = []
    for group in groups:
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(x := torch.ones(1), group=group)
        sums.append(int(x))
    return sums


def test_every_group_is_a_real_process_group(ranks: RankPool) -> None:
    """Never None, which would be the world to torch: an axis of size 1 sums over one rank."""
    sizes = [2, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 2, 2, 2]
    assert ranks.run(usable_groups, size=4) == [sizes] * 4


def resolved(world):
    with pytest.raises(RuntimeError, match="or pass tp_group="):
        ps.resolve(None)
    ps.initialize_model_parallel(2)
    grid = ps.get_default_grid()
    assert ps.resolve() is grid.tp
    assert ps.resolve(ps.get_tensor_model_parallel_group()) is grid.tp
    assert ps.resolve(ps.get_data_parallel_group()) is grid.dp
    assert ps.resolve(grid.pp) is grid.pp
    own = dist.new_group([0, 1, 2, 3])
    assert ps.resolve(own).handle is own and ps.resolve(own) is ps.resolve(own)
    assert ps.resolve(ps.get_pipeline_model_parallel_group()).size == 1
    assert ps.process_group(grid.tp) is grid.tp.handle
    assert ps.process_group(grid.pp).size() == 1


def test_resolve_accepts_what_users_have(ranks: RankPool) -> None:
    ranks.run(resolved, size=4)


def test_a_process_on_its_own_needs_nothing() -> None:
    assert ps.resolve().size == 1
    assert not ps.model_parallel_is_initialized() and ps.is_unitialized()
    assert ps.get_tensor_model_parallel_world_size() == 1
    assert ps.get_tensor_model_parallel_rank() == 0
    assert ps.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(RuntimeError, match="no default grid exists"):
        ps.get_tensor_model_parallel_group()
    ps.initialize_model_parallel()
    assert ps.is_initialized() and ps.get_all_ranks() == "0_0_0_0_0"
    with pytest.raises(RuntimeError, match=r"init_process_group\(\)"):
        ps.get_tensor_model_parallel_group()
    assert isinstance(ps.process_group(ps.resolve()), Group)
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized()


def test_a_grid_can_be_set() -> None:
    grid = ProcessGrid.single()
    ps.set_default_grid(grid)
    assert ps.get_default_grid() is grid and ps.resolve() is grid.tp


def refused(world):
    for wrong in (
        {"tensor_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 2},
        {"order": "tp-dp-dp"},
    ):
        with pytest.raises(RuntimeError):
            ps.initialize_model_parallel(**wrong)
        assert not ps.model_parallel_is_initialized()
    ps.initialize_model_parallel(1)
    with pytest.raises(RuntimeError, match="destroy_model_parallel"):
        ps.initialize_model_parallel(1)


def test_sizes_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    ranks.run(refused)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_sharp", True),
        ("hierarchical_context_parallel_sizes", [2]),
        ("expert_model_parallel_size", 2),
        ("expert_tensor_parallel_size", 2),
        ("num_distributed_optimizer_instances", 2),
        ("nccl_communicator_config_path", "x.yaml"),
        ("get_embedding_ranks", len),
        ("high_priority_stream_groups", ["dp"]),
        ("create_all_gather_group", True),
    ],
)
def test_what_does_not_exist_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported"):
        ps.initialize_model_parallel(**{name: value})
    with pytest.raises(NotImplementedError, match="partial"):
        ps.get_data_parallel_group(partial_data_parallel=True)


def test_harmless_arguments_are_accepted() -> None:
    ps.initialize_model_parallel(
        1,
        1,
        None,
        None,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=10,
        create_gloo_process_groups=False,
        high_priority_stream_groups=[],
    )


def test_pretended_sizes_and_ranks() -> None:
    ps.set_tensor_model_parallel_world_size(8)
    ps.set_tensor_model_parallel_rank(0)
    ps.set_pipeline_model_parallel_rank(3)
    assert ps.get_tensor_model_parallel_world_size() == 8
    assert ps.get_pipeline_model_parallel_rank() == 3
    ps.set_tensor_model_parallel_world_size(None)
    ps.set_pipeline_model_parallel_rank(None)
    assert ps.get_tensor_model_parallel_world_size() == 1
    assert ps.get_pipeline_model_parallel_rank() == 0


def chunks(world):
    ps.initialize_model_parallel(1, 2, 3)
    assert ps.get_virtual_pipeline_model_parallel_world_size() == 3
    assert ps.get_virtual_pipeline_model_parallel_rank() == 0
    return [
        (
            ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            ps.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=chunk),
        )
        for chunk in range(3)
    ]


def test_chunks_of_a_stage(ranks: RankPool) -> None:
    assert ranks.run(chunks) == [
        [(True, False, True), (False, False, False), (False, False, False)],
        [(False, False, False), (False, False, False), (False, True, True)],
    ]
