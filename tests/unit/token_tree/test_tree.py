"""Token trees from everything they can be made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trie import beams, packed_row

from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.errors import ArgumentError
from treeattn.token_tree import TokenTree, pack


@st.composite
def rows_of_parents(draw):
    """(tokens, parents, lengths) of a batch."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=batch * nodes, max_size=batch * nodes)))
    parents, lengths = np.full((batch, nodes), -7), []
    for row in range(batch):
        lengths.append(draw(st.integers(0, nodes)))
        for node in range(lengths[-1]):
            parents[row, node] = draw(st.integers(-1, node - 1))
    return tokens.reshape(batch, nodes), parents, lengths


@examples(40)
@given(beams())
def test_from_beams_is_the_packing(given_beams):
    tree, packed = TokenTree.from_beams(given_beams), pack(given_beams)
    np.testing.assert_array_equal(tree.tokens, packed.packed_beam)
    np.testing.assert_array_equal(tree.depths, packed.position_offsets)
    np.testing.assert_array_equal(tree.mask, packed.attention_mask)
    np.testing.assert_array_equal(tree.unpack_map, packed.unpack_map)
    for row, nodes in enumerate(tree.lengths):
        assert tree.parents[row, :nodes].tolist() == packed_row(given_beams[row])["parents"]
        assert (tree.parents[row, nodes:] == -1).all()


@examples(100)
@given(rows_of_parents())
def test_from_parents_keeps_what_is_given(made):
    tokens, parents, lengths = made
    given = np.array(lengths)
    tree = TokenTree.from_parents(tokens, parents, given)
    given += 1  # the caller's, still
    assert tree.lengths.tolist() == lengths
    assert tree.parents.dtype == np.int32
    for row, nodes in enumerate(lengths):
        for slot in range(nodes):
            ancestors = [slot]
            while parents[row, ancestors[-1]] >= 0:
                ancestors.append(int(parents[row, ancestors[-1]]))
            assert tree.path(row, slot).tolist() == ancestors[::-1]
            assert set(np.flatnonzero(tree.mask[row, slot])) == set(ancestors)
            assert tree.depths[row, slot] == len(ancestors) - 1
        assert tree.tokens[row].tolist() == [
            *tokens[row, :nodes],
            *tokens[row, [0] * (len(tokens[0]) - nodes)],
        ]
        assert tree.parents[row].tolist() == [*parents[row, :nodes], *[-1] * (len(tokens[0]) - nodes)]
        assert tree.unpack_map[row].tolist() == [*range(nodes), *[-1] * (len(tokens[0]) - nodes)]
        assert not tree.mask[row, :, nodes:].any() or not nodes


@examples(60)
@given(rows_of_parents())
def test_children_and_paths(made):
    tree = TokenTree.from_parents(*made)
    for row, nodes in enumerate(tree.lengths):
        below = {slot: tree.children(row, slot).tolist() for slot in range(-1, nodes)}
        assert sorted(child for children in below.values() for child in children) == list(range(nodes))
        assert all(tree.parents[row, child] == slot for slot in below for child in below[slot])
        for path in (tree.path(row, slot).tolist() for slot in range(nodes)):
            assert tree.check_path(row, path).tolist() == path
            if len(path) > 1:
                with pytest.raises(ArgumentError, match="is no path of row"):
                    tree.check_path(row, path[1:])


def test_paths_are_named_as_medusa_names_them():
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    assert tree.parents.tolist() == [[-1, -1, 0, 0, 2]]
    assert tree.tokens.tolist() == [[0, 1, 0, 1, 0]]
    assert tree.depths.tolist() == [[0, 0, 1, 1, 2]]
    assert tree.unpack_map[0, 4].tolist() == [0, 2, 4]


def test_a_chain_sees_what_came_before():
    tree = TokenTree.chain([[4, 5, 6], [7, 8, 9]], lengths=[3, 2])
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert tree.mask[0].tolist() == np.tri(3, dtype=bool).tolist()


def test_equal_trees_have_one_digest():
    tree = TokenTree.from_paths([[1, 2], [1, 3]])
    assert tree.digest == TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 0]]).digest
    others = [
        TokenTree.from_parents([[1, 2, 4]], [[-1, 0, 0]]),
        TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 1]]),
        TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 0]], [2]),
    ]
    assert len({tree.digest, *(other.digest for other in others)}) == 4


CHAIN = TokenTree.chain([[1, 2, 3]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenTree.from_parents([[1, 2, 3]], [[-1, 2, 0]]), "node 1 has parent 2: it is an earlier"),
        (lambda: TokenTree.from_parents([[1]], [[0]]), "row 0: node 0 has parent 0"),
        (lambda: TokenTree.from_parents([[1] * 4] * 2, [[-1, 0, 1, 2], [0] + [-1] * 3], [4, 1]), "row 1: "),
        (lambda: TokenTree.from_parents([[1, 2]], [[-1, -2]]), "node 1 has parent -2"),
        (lambda: TokenTree.from_parents([[1, 2]], [[-1, 0]], [3]), "from 0 to 2 nodes"),
        (lambda: TokenTree.from_parents([[1.0]], [[-1]]), "tokens are float64"),
        (lambda: TokenTree.from_parents([[1]], [[-1.0]]), "parents are float64"),
        (lambda: TokenTree.from_parents([[True]], [[-1]]), "tokens are bool"),
        (lambda: TokenTree.from_parents([1], [-1]), "both are [batch, nodes]"),
        (lambda: TokenTree.from_parents(np.zeros((1, 0), int), np.zeros((1, 0), int)), "both are"),
        (lambda: TokenTree.from_beams(np.zeros((1, 1, 1))), "float64: token ids are integers"),
        (lambda: TokenTree.from_paths([[1, "a"]]), "is no token id, an integer"),
        (lambda: TokenTree.from_paths([[1, 2**63]]), "an integer of 64 bits"),
        (lambda: TokenTree.from_paths([]), "no paths"),
        (lambda: TokenTree.chain([[1], [2, 3]]), "rows of equal length"),
        (lambda: TokenTree.from_paths([[[]]]), "no path with a token"),
        (lambda: TokenTree.from_paths([1, 2]), "lists of token ids"),
        (lambda: CHAIN.check_path(0, [0, 2]), "is no path of row 0"),
        (lambda: CHAIN.check_path(0, [0, 1, 2, 3]), "is no path of row 0"),
        (lambda: CHAIN.check_path(0, [-1]), "is no path of row 0"),
        (lambda: CHAIN.check_path(0, [0.0]), "a path is a list of slots"),
    ],
)
def test_what_is_no_tree(make, words):
    with refused(words):
        make()
