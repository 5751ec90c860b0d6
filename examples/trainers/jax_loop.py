"""JAX: each process reads its part of the batch, and the parts are one array over all devices.

The devices are the same for any number of processes (here 4 in all), so JAX compiles one and the
same program. It computes a gradient for each sample and gathers them before it adds them up: then
no sum depends on where the samples are (see `tiny_gpt.py`).

    RANK=0 WORLD_SIZE=1 python examples/trainers/jax_loop.py FOLDER
"""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import tiny_data
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import millrace

DEVICES, WIDTH = 4, 16


def losses(parameters, tokens, labels, loss_mask):
    """The loss of one sample."""
    hidden = jnp.tanh(parameters["embedding"][tokens] @ parameters["hidden"])
    scores = jax.nn.log_softmax(hidden @ parameters["head"])
    return -(jnp.take_along_axis(scores, labels[:, None], 1)[:, 0] * loss_mask).sum()


def main() -> None:
    options = tiny_data.arguments("train with JAX")
    jax.config.update("jax_num_cpu_devices", DEVICES // options.ranks)
    if options.ranks > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, options.ranks, options.rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_sample = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    loader = millrace.Loader(
        tiny_data.make_dataset(options),
        micro_batch_size=tiny_data.GLOBAL_BATCH // options.ranks,
        data_parallel_rank=options.rank,
        data_parallel_size=options.ranks,
        fields=("tokens", "labels", "loss_mask"),
        token_dtype="int32",
    )
    shapes = {"embedding": (tiny_data.VOCABULARY, WIDTH), "hidden": (WIDTH, WIDTH)}
    shapes["head"] = (WIDTH, tiny_data.VOCABULARY)
    random = np.random.default_rng(1)
    parameters = {name: random.normal(0, 0.3, shape).astype("f4") for name, shape in shapes.items()}
    step, checkpoint = 0, options.folder / "checkpoint.npz"
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            parameters = {name: saved[name] for name in shapes}
            step = int(saved["step"])
            loader.load_state_dict(json.loads(str(saved["loader"])))
    parameters = jax.device_put(parameters, everywhere)

    @jax.jit
    def train_step(parameters, batch):
        per_sample = jax.vmap(jax.value_and_grad(losses), in_axes=(None, 0, 0, 0))
        results = per_sample(parameters, batch["tokens"], batch["labels"], batch["loss_mask"])
        results = jax.lax.with_sharding_constraint(results, everywhere)
        loss, gradients = jax.tree.map(lambda rows: rows.sum(0), results)
        return loss, jax.tree.map(lambda p, g: p - 1e-2 * g, parameters, gradients)

    for batch in loader:
        batch = {
            name: jax.make_array_from_process_local_data(by_sample, array)
            for name, array in batch.items()
        }
        loss, parameters = train_step(parameters, batch)
        step += 1
        if step % options.save_every == 0 and options.rank == 0:
            arrays = {name: np.asarray(array) for name, array in parameters.items()}
            new = checkpoint.with_suffix(".new.npz")
            np.savez(new, **arrays, step=step, loader=json.dumps(loader.state_dict()))
            os.replace(new, checkpoint)
        tiny_data.log(options, step, float(loss))
        if step == options.steps:
            break
    loader.close()
    if options.ranks > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
