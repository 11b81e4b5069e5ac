#include "kv/prefix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

using Tokens = std::vector<TokenId>;

TEST(PrefixTree, FindsAChildByParentKeyAndTokens) {
  PrefixTree tree(2, 4);
  const NodeId root = tree.root_or_new({});
  const NodeId first = tree.add(root, 11, Tokens{1, 2});
  const NodeId second = tree.add(first, 12, Tokens{1, 2});
  EXPECT_EQ(tree.find(root, 11, Tokens{1, 2}), first);
  EXPECT_EQ(tree.find(first, 12, Tokens{1, 2}), second);
  EXPECT_EQ(tree.find(root, 12, Tokens{1, 2}), kNoNode);
  EXPECT_EQ(tree.find(root, 11, Tokens{1, 3}), kNoNode);
  tree.check_invariants();
}

TEST(PrefixTree, TellsNodesOfEqualKeysApart) {
  constexpr std::uint64_t kKey = 5;
  PrefixTree tree(2, 4);
  const NodeId root = tree.root_or_new({});
  const NodeId other_root = tree.root_or_new({1, ""});
  const NodeId a = tree.add(root, kKey, Tokens{1, 2});
  const NodeId b = tree.add(root, kKey, Tokens{3, 4});
  const NodeId under_a = tree.add(a, kKey, Tokens{1, 2});
  const NodeId elsewhere = tree.add(other_root, kKey, Tokens{1, 2});
  const auto expect_all = [&](NodeId expected_a) {
    EXPECT_EQ(tree.find(root, kKey, Tokens{1, 2}), expected_a);
    EXPECT_EQ(tree.find(root, kKey, Tokens{3, 4}), b);
    EXPECT_EQ(tree.find(other_root, kKey, Tokens{1, 2}), elsewhere);
    tree.check_invariants();
  };
  expect_all(a);
  EXPECT_EQ(tree.find(a, kKey, Tokens{1, 2}), under_a);
  tree.remove(under_a);
  EXPECT_EQ(tree.find(a, kKey, Tokens{1, 2}), kNoNode);
  tree.remove(a);
  expect_all(kNoNode);
  EXPECT_EQ(tree.walk(root, std::vector<std::uint64_t>{kKey, kKey}, Tokens{3, 4, 3, 4}), (std::vector<NodeId>{b}));
}

TEST(PrefixTree, HasARootPerRealm) {
  PrefixTree tree(2, 1);
  EXPECT_EQ(tree.root({}), kNoNode);
  const NodeId plain = tree.root_or_new({});
  const NodeId salted = tree.root_or_new({0, "x"});
  EXPECT_NE(plain, salted);
  EXPECT_EQ(tree.root_or_new({0, "x"}), salted);
  tree.remove(plain);
  EXPECT_EQ(tree.root({}), kNoNode);
  EXPECT_EQ(tree.root({0, "x"}), salted);
  tree.check_invariants();
}

TEST(PrefixTree, ListsChildrenByRecencyAndPartialOnesAmongThem) {
  PrefixTree tree(3, 4);
  const NodeId root = tree.root_or_new({});
  const NodeId full = tree.add(root, 1, Tokens{1, 2, 3});
  const NodeId partial = tree.add(root, 0, Tokens{1, 2});
  const NodeId last = tree.add(root, 3, Tokens{7, 8, 9});
  const auto children = [&] {
    std::vector<NodeId> found;
    for (NodeId child = tree[root].first_child; child != kNoNode; child = tree[child].next) {
      found.push_back(child);
    }
    return found;
  };
  EXPECT_EQ(children(), (std::vector<NodeId>{last, partial, full}));
  tree.move_to_front(full);
  EXPECT_EQ(children(), (std::vector<NodeId>{full, last, partial}));
  tree.remove(last);
  EXPECT_EQ(children(), (std::vector<NodeId>{full, partial}));
  EXPECT_EQ(tree.find(root, 0, Tokens{1, 2}), kNoNode);  // partial ones have no key
  tree.check_invariants();
}

TEST(PrefixTree, IsAMapOfPrefixesUnderRandomUse) {
  std::mt19937 random(4);
  PrefixTree tree(2, 1);
  std::map<Tokens, NodeId> expected;  // all tokens up to the node's end
  const auto key_of = [](const Tokens& tokens) { return static_cast<std::uint64_t>(tokens.size() % 3); };  // collides
  expected[{}] = tree.root_or_new({});
  for (int i = 0; i < 4000; ++i) {
    const auto picked = std::next(expected.begin(), static_cast<std::ptrdiff_t>(random() % expected.size()));
    const auto [tokens, node] = *picked;
    if (random() % 2 == 0) {
      Tokens child = tokens;
      child.push_back(static_cast<TokenId>(random() % 3));
      child.push_back(static_cast<TokenId>(random() % 3));
      const std::span<const TokenId> block = std::span(child).last(2);
      const NodeId found = tree.find(node, key_of(child), block);
      ASSERT_EQ(found != kNoNode, expected.contains(child));
      if (found == kNoNode) {
        expected[child] = tree.add(node, key_of(child), block);
      } else {
        ASSERT_EQ(found, expected[child]);
      }
    } else if (!tokens.empty() && tree[node].first_child == kNoNode) {
      tree.remove(node);
      expected.erase(picked);
    }
    // The walk along these tokens, and one step further than the tree goes, finds what the map has.
    Tokens walked = tokens;
    walked.insert(walked.end(), {99, 99});
    std::vector<std::uint64_t> keys;
    std::vector<NodeId> path;
    for (std::size_t end = 2; end <= walked.size(); end += 2) {
      const Tokens prefix(walked.begin(), walked.begin() + static_cast<std::ptrdiff_t>(end));
      keys.push_back(key_of(prefix));
      if (const auto found = expected.find(prefix); found != expected.end()) {
        path.push_back(found->second);
      }
    }
    ASSERT_EQ(tree.walk(expected[{}], keys, walked), path);
    ASSERT_NO_THROW(tree.check_invariants());
    ASSERT_EQ(tree.num_nodes(), static_cast<std::int32_t>(expected.size()));
  }
  EXPECT_GT(expected.size(), 20U);
  tree.clear();
  EXPECT_EQ(tree.num_nodes(), 0);
  tree.check_invariants();
}

}  // namespace
}  // namespace aotllm
