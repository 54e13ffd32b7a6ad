"""Threads of one process: each with a cache of its own writes the texts it would write alone; a second one in
the same cache, or over the same communicator of several ranks, is refused before it sends anything."""

import math
import threading

import pytest
import torch
import transformers

from tests.support.tiny_models import assert_close, made, prompt
from treeattn import huggingface
from treeattn.errors import StateError
from treeattn.huggingface import attention, layers, plans

NEW = 6  # tokens of a text
ROUNDS = 4
BARRIER = threading.Barrier(2, timeout=60)


@pytest.fixture
def run():
    """Run calls, each in a thread of its own, all at the same time: what they returned or raised."""

    def run(*calls):
        found = [None] * len(calls)

        def work(number):
            try:
                found[number] = calls[number]()
            except Exception as error:
                found[number] = error
                BARRIER.abort()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found

    return run


@pytest.fixture
def in_step(monkeypatch):
    """Two threads go on together from every place where one could take what is the other's: a layer that
    waits for its attention, a result that is not copied yet."""

    def before(owner, name):
        call = getattr(owner, name)

        def together(*given, **named):
            BARRIER.wait()
            return call(*given, **named)

        monkeypatch.setattr(owner, name, together)

    BARRIER.reset()
    before(layers, "carrying")
    before(attention, "finished")


@pytest.fixture(params=["Llama", "Qwen3 with windows", "DeepSeek-V3"])
def models(request):
    """(treeattn's, eager's)"""
    return made(request.param, "treeattn"), made(request.param)


def text(model, ids, cache=None, **more):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, cache=cache, **more)[0].tolist()


def prompts(number):
    return [prompt(1, 9, seed=10 * number + one) for one in range(2)]


def test_two_caches_in_two_threads(models, run, in_step):
    """Each over a communicator of this rank alone."""
    model, eager = models
    for number in range(ROUNDS):
        ids = prompts(number)
        wanted = [text(eager, one) for one in ids]
        assert wanted[0][9:] != wanted[1][9:]

        def write(one):
            cache = huggingface.ShardedKV(model.config, plans.alone().comm, capacity=64)
            return text(model, one, cache)

        assert run(*(lambda one=one: write(one) for one in ids)) == wanted


class Meanwhile(transformers.LogitsProcessor):
    """What another thread gets that tries something in the middle of a text."""

    def __init__(self, run, *calls):
        self.run, self.calls, self.found = run, calls, []

    def __call__(self, _ids, scores):
        self.found = self.found or self.run(*self.calls)
        return scores


@pytest.mark.parametrize("family", ["Llama", "Qwen3-Next"])
def test_a_second_thread_in_the_same_cache(comm, run, family):
    """It is refused on every rank, and the text of the first is right."""
    model, ids = made(family, "treeattn"), prompts(0)[0]
    wanted = text(made(family), ids)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    second = Meanwhile(run, lambda: text(model, ids, cache), cache.reset, lambda: cache.crop(-1))
    assert text(model, ids, cache, logits_processor=[second]) == wanted
    assert [type(one) for one in second.found] == [StateError] * 3
    assert "used by another thread (MainThread)" in str(second.found[0])


@torch.no_grad()
def test_a_second_thread_in_a_compiled_model(comm, run):
    """Whose update is traced, and asks nobody."""
    model, step = made("Llama", "treeattn"), prompts(0)[0][:, :1]
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    compiled = torch.compile(model, backend="eager")
    for ids in prompts(0)[0], step:
        compiled(ids, cache=cache)
    (found,) = run(lambda: compiled(step, cache=cache))
    assert "used by another thread (MainThread)" in str(found)


def test_two_caches_over_one_communicator(comm, run):
    """Of several ranks: refused before anything is sent; of one rank: right."""
    model, (first, other) = made("Llama", "treeattn"), prompts(1)
    wanted = [text(made("Llama"), ids) for ids in (first, other)]
    caches = [huggingface.ShardedKV(model.config, comm, capacity=64) for _ in range(2)]

    def anew():
        return text(model, other, huggingface.ShardedKV(model.config, comm, capacity=64))

    second = Meanwhile(run, lambda: text(model, other, caches[1]), anew)
    assert text(model, first, caches[0], logits_processor=[second]) == wanted[0]
    if comm.size == 1:
        assert second.found == [wanted[1]] * 2
    else:
        assert [type(one) for one in second.found] == [StateError] * 2
    caches[1].reset()
    assert text(model, other, caches[1]) == wanted[1]


def test_two_threads_over_two_communicators(comm, run):
    """All ranks write both texts, in whatever order their threads come."""
    if comm.library == "torch":
        pytest.skip("one process group is there")
    model, ids, own = made("Llama", "treeattn"), prompts(2), [comm.dup(), comm.dup()]
    wanted = [text(made("Llama"), one) for one in ids]
    caches = [huggingface.ShardedKV(model.config, one, capacity=64) for one in own]
    both = (
        lambda one=one, cache=cache: text(model, one, cache) for one, cache in zip(ids, caches, strict=True)
    )
    assert run(*both) == wanted
    for one in own:
        one.free()


def test_threads_that_end_leave_no_communicator(monkeypatch, comm, run):
    """Of what a rank has whole each has plans of its own, which nothing closes."""

    def one_more(_):
        raise AssertionError("MPI has few communicators")

    if comm.library == "mpi":  # torch's are tags of one group
        monkeypatch.setattr(type(comm), "dup", one_more)
    q, k = torch.ones(1, 1, 2, 16), torch.ones(1, 5, 2, 16)
    for out, lse in run(*[lambda: plans.alone().attend(q, k, k, range(4, 5), plans.Scoring(0.25))] * 2):
        assert_close(out, q)
        assert_close(lse, torch.full((1, 2, 1), 4 + math.log(5)))


def test_a_cache_goes_from_thread_to_thread(comm, run):
    """One makes it, another writes, the first empties it, a third writes."""
    model, ids = made("Llama", "treeattn"), prompts(3)
    wanted = [text(made("Llama"), one) for one in ids]
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    for one, whole in zip(ids, wanted, strict=True):
        assert run(lambda one=one: text(model, one, cache)) == [whole]
        assert cache.get_seq_length() == len(whole) - 1
        cache.reset()


def test_caches_over_one_communicator_share_their_plans(comm):
    """Whose results are taken before the next step: two texts in turn are those of each alone."""
    model, ids = made("Llama", "treeattn"), prompts(4)
    wanted = [text(made("Llama"), one) for one in ids]
    caches = [huggingface.ShardedKV(model.config, comm, capacity=64) for _ in ids]
    both = [text(model, one, cache) for one, cache in zip(ids, caches, strict=True)]
    assert both == wanted
    assert caches[0].plans() is caches[1].plans()
    more = [text(model, torch.tensor([one]), cache) for one, cache in zip(both, caches, strict=True)]
    assert more == [text(made("Llama"), torch.tensor([one])) for one in wanted]
