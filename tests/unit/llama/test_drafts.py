"""One process: what n-grams propose, and the tree of it."""

from treeattn.llama.drafts import NgramDrafts, draft_tree


def test_what_followed_the_longest_words_is_proposed():
    assert NgramDrafts()([1, 2, 3, 9, 8, 7, 5, 3, 1, 1, 2, 3], 4, 4) == [[9, 8, 7, 5]]
    assert NgramDrafts()([1, 2, 3, 9, 8, 7, 5, 3, 1, 1, 2, 3], 4, 2) == [[9, 8]]
    assert NgramDrafts()([4, 3, 1, 1, 2, 3], 4, 4) == [[1, 1, 2, 3]]
    assert NgramDrafts()([1, 2, 3], 4, 4) == []


def test_two_places_that_differ_share_the_budget():
    text = [5, 1, 8, 5, 2, 6, 5, 2, 6, 5]
    assert NgramDrafts()(text, 4, 9) == [[2, 6, 5]]  # by three tokens there is one
    assert NgramDrafts(longest=1)(text, 4, 9) == [[2, 6], [1, 8]]
    assert NgramDrafts(longest=1)(text, 1, 9) == [[2]]


def test_a_tree_has_the_last_token_as_its_root():
    tree = draft_tree(7, [[1, 2], [1, 3]], 6)
    assert (tree.nodes, tree.lengths.tolist()) == (6, [4])
    assert tree.tokens[0, :4].tolist() == [7, 1, 2, 3]
    assert tree.parents[0, :4].tolist() == [-1, 0, 1, 1]
