"""What surrounds a loop, against the libraries' own objects."""

import importlib
import math
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from bareloop.profiler.probes.surroundings import (  # noqa: E402
    LoaderFacts,
    autocast_dtype,
    frame_locals,
    learning_rate,
    loader_facts,
    loader_shards,
    observe_environment,
    observe_optimizer,
    observe_wrapper,
    trainable_parameters,
    weight_decay,
)


def layer() -> Any:
    return torch.nn.Linear(3, 2)


def loader(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(42, 2)), **{"batch_size": 4, **options})


def test_the_environment_of_a_plain_loop() -> None:
    seen = observe_environment(layer().parameters(), loader(), sys._getframe())
    assert (seen.framework, seen.device, seen.loader_workers, seen.prefetched_batches) == (None, "cpu", 0, 0)
    assert seen.torch == torch.__version__
    assert seen.python == ".".join(str(part) for part in sys.version_info[:3])
    assert seen.threads == torch.get_num_threads()
    assert seen.resident_bytes > 50e6
    assert seen.device_name
    assert seen.cores >= 1


def test_versions_are_of_what_was_imported() -> None:
    accelerate = pytest.importorskip("accelerate")
    packages = observe_environment([], None, None).packages
    assert packages["accelerate"] == accelerate.__version__
    assert set(packages) <= {name.replace("_", "-") for name in sys.modules}


def test_workers_prefetch() -> None:
    assert loader_facts(loader(num_workers=2, prefetch_factor=3)) == LoaderFacts(2, 6, 4, 42)
    assert loader_facts(None) == loader_facts([1, 2]) == LoaderFacts()


def test_loaders_without_batches_or_lengths() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([1])

    class Refusing(Stream):
        def __len__(self) -> int:
            raise NotImplementedError

    assert loader_facts(DataLoader(Stream(), batch_size=None)) == LoaderFacts(0, 0, None, None)
    assert loader_facts(DataLoader(Refusing(), batch_size=2)) == LoaderFacts(0, 0, 2, None)


def test_loaders_inside_wrappers() -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches
    from tqdm import tqdm

    shard = prepare_data_loader(loader(), num_processes=2, process_index=0, put_on_device=False)
    assert isinstance(shard, DataLoaderShard)
    assert (loader_facts(shard), loader_shards(shard)) == (LoaderFacts(0, 0, 4, 42), 2)
    assert loader_facts(tqdm(shard, disable=True)).dataset_size == 42
    assert loader_facts(skip_first_batches(loader(), 3)).dataset_size == 42
    split = prepare_data_loader(loader(), num_processes=2, process_index=0, put_on_device=False, split_batches=True)
    assert loader_facts(split).batch_size == 2
    sampler = torch.utils.data.DistributedSampler(loader().dataset, num_replicas=3, rank=0)
    assert loader_shards(loader(sampler=sampler)) == 3
    assert loader_shards(loader()) == 1


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about torch
def test_lightnings_combined_loader() -> None:
    combined = pytest.importorskip("lightning.pytorch.utilities.combined_loader")
    assert loader_facts(combined.CombinedLoader(loader())) == LoaderFacts(0, 0, 4, 42)


def test_an_iterable_shard_speaks_of_the_whole() -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import IterableDatasetShard

    class Sized(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(42))

        def __len__(self) -> int:
            return 42

    shard = DataLoader(IterableDatasetShard(Sized(), batch_size=4, num_processes=2), batch_size=4)
    assert loader_facts(shard).dataset_size == 42
    assert loader_shards(shard) == 2


def test_wrappers() -> None:
    model = layer()
    assert observe_wrapper(model) == "none"
    assert observe_wrapper(torch.nn.DataParallel(model)) == "DataParallel"
    assert observe_wrapper(torch.nn.Sequential(torch.nn.DataParallel(model))) == "DataParallel"


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # FSDP's, about a world of one process
def test_distributed_wrappers_and_sharded_parameters(one_process: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    assert observe_wrapper(DistributedDataParallel(layer())) == "DistributedDataParallel"
    sharded = layer()
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert observe_wrapper(sharded) == "FSDP2"
    assert trainable_parameters([torch.optim.SGD(sharded.parameters())]) == 8
    flat = FullyShardedDataParallel(layer(), device_id=torch.device("cpu"))
    assert observe_wrapper(flat) == "FullyShardedDataParallel"
    assert trainable_parameters([torch.optim.SGD(flat.parameters())]) == 8


def test_an_optimizer_in_groups() -> None:
    model = layer()
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    seen = observe_optimizer(optimizer, 2.0)
    assert (seen.name, seen.fused, seen.per_step) == ("AdamW", False, 2.0)
    assert [(g.learning_rate, g.weight_decay, g.tensors, g.elements) for g in seen.groups] == [
        (0.25, 0.1, 1, 6),
        (0.5, 0.0, 1, 2),
    ]
    assert weight_decay([optimizer]) == (0.1, 0.0)
    assert learning_rate([optimizer]) == (0.25, 0.5)
    assert trainable_parameters([optimizer, optimizer]) == 8
    model.bias.requires_grad_(False)
    assert trainable_parameters([optimizer]) == 6


@pytest.mark.parametrize("name", ["fused", "foreach", None])
def test_fused_and_foreach_are_what_torch_runs(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is torch: which of its three AdamW implementations is called."""
    adam, called = importlib.import_module("torch.optim.adam"), []
    for kind in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        original = getattr(adam, kind)
        monkeypatch.setattr(
            adam, kind, lambda *a, _kind=kind, _run=original, **k: (called.append(_kind), _run(*a, **k))
        )
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), **({} if name is None else {name: True}))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    seen = observe_optimizer(optimizer, 1.0)
    expected = {
        (True, False): "_fused_adam",
        (False, True): "_multi_tensor_adam",
        (False, False): "_single_tensor_adam",
    }
    assert called == [expected[bool(seen.fused), bool(seen.foreach)]]


def test_optimizers_without_choices_and_inside_a_wrapper() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    model = layer()
    seen = observe_optimizer(torch.optim.LBFGS(model.parameters()), 1.0)
    assert (seen.fused, seen.foreach, seen.groups[0].weight_decay) == (None, None, None)
    assert weight_decay([torch.optim.LBFGS(model.parameters())]) is None
    wrapped = Accelerator(cpu=True).prepare_optimizer(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5)))
    assert observe_optimizer(wrapped, 1.0).name == "SGD"
    assert learning_rate([wrapped]) == 0.5
    assert weight_decay([wrapped]) == 0.0
    assert trainable_parameters([]) is None
    bare = SimpleNamespace(param_groups=[{"params": [model.weight]}])
    assert math.isnan(observe_optimizer(bare, 1.0).groups[0].learning_rate)


def test_autocast() -> None:
    assert autocast_dtype("cpu") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype("cpu") == "bfloat16"


def test_reading_a_frame_keeps_nothing_alive_in_it() -> None:
    import gc
    import weakref

    class Large:
        pass

    def holder() -> Any:
        large = Large()
        watch = weakref.ref(large)
        seen = frame_locals(sys._getframe())
        assert seen.pop("large") is large
        seen.clear()
        del large
        gc.collect()
        return watch() is None

    assert holder()


def test_a_frame_that_calls_locals_is_left_alone() -> None:
    def inner(frame: FrameType) -> dict[str, Any]:
        return frame_locals(frame)

    mine = locals()
    later = 1
    if sys.version_info < (3, 13):
        assert inner(sys._getframe()) == {}
    assert "later" not in mine
    assert later == 1


def framework_at_step(run: Any) -> set[str | None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen: set[str | None] = set()
    handle = register_optimizer_step_post_hook(
        lambda *_: seen.add(observe_environment([], None, sys._getframe()).framework)
    )
    try:
        run()
    finally:
        handle.remove()
    return seen


def test_the_framework_is_seen_on_the_stack_not_among_imports() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    model = layer()
    optimizer = torch.optim.SGD(model.parameters())
    assert framework_at_step(optimizer.step) == {None}
    assert framework_at_step(Accelerator(cpu=True).prepare_optimizer(optimizer).step) == {"accelerate"}


def test_a_subclass_of_transformers_trainer_is_transformers(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")

    class Own(transformers.Trainer):
        pass

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8} for _ in range(4)]
    args = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Own(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=rows)
    assert framework_at_step(trainer.train) == {"transformers"}


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_fabric_is_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu")
    model = layer()
    _, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
    assert framework_at_step(optimizer.step) == {"lightning"}
