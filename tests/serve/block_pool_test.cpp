// SPDX-License-Identifier: MIT
#include "support/temporary_folder.hpp"

#include <bellows/serve/block_pool.hpp>

#include <numeric>
#include <vector>

using namespace bellows;

namespace {

using Blocks = std::vector<std::uint32_t>;

/// So many blocks of tokens that no other `first` gives.
std::vector<std::uint32_t> text(std::uint64_t blocks, std::uint32_t first) {
    std::vector<std::uint32_t> tokens(blocks * kBlockTokens);
    std::iota(tokens.begin(), tokens.end(), first * 1'000'000);
    return tokens;
}

/// Takes blocks for a text and says that they are computed.
Blocks hold(BlockPool& pool, const std::vector<std::uint32_t>& tokens) {
    Blocks blocks;
    auto content = BlockContent::Start;
    for (std::uint64_t i = 0; i < tokens.size() / kBlockTokens; ++i) {
        blocks.push_back(pool.allocate().value());
        content = pool.publish(blocks.back(), content,
                               std::span(tokens).subspan(i * kBlockTokens, kBlockTokens));
    }
    return blocks;
}

void check(const BlockPool& pool, std::initializer_list<Blocks> tables) {
    const std::vector<std::span<const std::uint32_t>> spans(tables.begin(), tables.end());
    pool.check(spans);
}

std::uint64_t one_hash(BlockContent, std::span<const std::uint32_t>) {
    return 7;
}
std::uint64_t hash_of_tokens_alone(BlockContent, std::span<const std::uint32_t> tokens) {
    return tokens[0];
}

} // namespace

TEST(BlockPool, GivesEachBlockOnce) {
    BlockPool pool(3);
    const Blocks all = {*pool.allocate(), *pool.allocate(), *pool.allocate()};
    EXPECT_EQ(pool.allocate(), std::nullopt);
    check(pool, {all});
    EXPECT_EQ(pool.counters(), (BlockPoolCounters{.blocks = 3, .used = 3}));
    pool.release(all);
    check(pool, {});
    EXPECT_EQ(pool.counters(), (BlockPoolCounters{.blocks = 3, .free = 3}));
    EXPECT_TRUE(pool.allocate().has_value());
}

TEST(BlockPool, ChecksFindWhatDoesNotAgree) {
    BlockPool pool(3);
    const Blocks held = {*pool.allocate()};
    EXPECT_BELLOWS_ERROR(check(pool, {}), Internal, "another number of holders");
    EXPECT_BELLOWS_ERROR(check(pool, {held, held}), Internal, "another number of holders");
    EXPECT_BELLOWS_ERROR(check(pool, {{held[0], held[0]}}), Internal, "twice in a table");
    check(pool, {held});
    EXPECT_BELLOWS_ERROR(pool.release(Blocks{2}), Internal, "nobody holds it");
    EXPECT_BELLOWS_ERROR(pool.release(Blocks{3}), Internal, "does not exist");
    EXPECT_BELLOWS_ERROR(BlockPool(0), InvalidArgument, "0 blocks");
    EXPECT_BELLOWS_ERROR(BlockPool(std::uint64_t{1} << 32), InvalidArgument, "4294967296 blocks");
}

TEST(BlockPool, FindsTheLongestKnownBeginning) {
    BlockPool pool(8);
    const auto tokens = text(3, 1);
    const Blocks blocks = hold(pool, tokens);
    EXPECT_EQ(pool.find_prefix(tokens, 9), blocks);
    EXPECT_EQ(pool.find_prefix(tokens, 2), Blocks(blocks.begin(), blocks.begin() + 2));
    EXPECT_EQ(pool.find_prefix(std::span(tokens).first(3 * kBlockTokens - 1), 9).size(), 2u)
        << "full blocks only";
    auto other = tokens;
    other[kBlockTokens + 5] ^= 1;
    EXPECT_EQ(pool.find_prefix(other, 9).size(), 1u);
    EXPECT_EQ(pool.find_prefix(std::span(tokens).subspan(kBlockTokens), 9), Blocks{})
        << "the same tokens after another text";

    const Blocks again = pool.find_prefix(tokens, 2);
    pool.take(again);
    check(pool, {blocks, again});
    pool.release(blocks);
    check(pool, {again});
    EXPECT_EQ(pool.counters(),
              (BlockPoolCounters{.blocks = 8, .used = 2, .free = 6, .cached = 3, .hits = 2}));
    EXPECT_EQ(pool.find_prefix(tokens, 9), blocks) << "nobody holds the last one";
}

TEST(BlockPool, EvictsUnknownBlocksFirstThenThoseReleasedLongestAgo) {
    BlockPool pool(5);
    const auto first = text(2, 1), second = text(2, 2);
    const Blocks a = hold(pool, first), b = hold(pool, second);
    pool.release(b);
    pool.release(a);
    const std::uint32_t plain = *pool.allocate();
    EXPECT_TRUE(plain != a[0] && plain != a[1] && plain != b[0] && plain != b[1]);
    EXPECT_EQ(*pool.allocate(), b[1]) << "the end of a text before its beginning";
    EXPECT_EQ(pool.find_prefix(second, 9), Blocks{b[0]});
    pool.take(Blocks{b[0]}); // used again: it stays
    EXPECT_EQ(*pool.allocate(), a[1]);
    EXPECT_EQ(*pool.allocate(), a[0]);
    EXPECT_EQ(pool.allocate(), std::nullopt);
    EXPECT_EQ(pool.find_prefix(first, 9), Blocks{});
    EXPECT_EQ(pool.find_prefix(second, 9), Blocks{b[0]});
    EXPECT_EQ(pool.counters().evictions, 3u);
    check(pool, {{plain, b[1], b[0], a[1], a[0]}});
}

TEST(BlockPool, KeepsTheFirstOfEqualTexts) {
    BlockPool pool(6);
    const auto tokens = text(2, 1);
    const Blocks a = hold(pool, tokens), b = hold(pool, tokens);
    EXPECT_EQ(pool.find_prefix(tokens, 9), a);
    EXPECT_EQ(pool.counters().cached, 2u);
    pool.release(b);
    EXPECT_EQ(pool.find_prefix(tokens, 9), a);
    // What follows the second copy is found behind the first.
    auto longer = tokens;
    const auto tail = text(1, 9);
    longer.insert(longer.end(), tail.begin(), tail.end());
    const std::uint32_t last = *pool.allocate();
    pool.publish(last, pool.content(a[1]), tail);
    EXPECT_EQ(pool.find_prefix(longer, 9), (Blocks{a[0], a[1], last}));
    check(pool, {a, {last}});
}

TEST(BlockPool, CollisionsNeverGiveAnotherText) {
    BlockPool pool(6, one_hash);
    const auto first = text(2, 1), second = text(2, 2);
    const Blocks a = hold(pool, first);
    EXPECT_EQ(pool.find_prefix(first, 9), Blocks{a[0]}) << "the second block has the same hash";
    const Blocks b = hold(pool, second);
    EXPECT_EQ(pool.find_prefix(second, 9), Blocks{});
    EXPECT_EQ(pool.find_prefix(std::span(first).subspan(kBlockTokens), 9), Blocks{});
    check(pool, {a, b});
    pool.release(b);
    pool.release(a);
    check(pool, {});

    BlockPool other(6, hash_of_tokens_alone);
    hold(other, first);
    EXPECT_EQ(other.find_prefix(first, 9).size(), 2u);
    EXPECT_EQ(other.find_prefix(std::span(first).subspan(kBlockTokens), 9), Blocks{})
        << "the same tokens with the same hash after another text";
}

TEST(BlockPool, AnEvictedBeginningHidesWhatFollowed) {
    BlockPool pool(3);
    const auto tokens = text(2, 1);
    const Blocks a = hold(pool, tokens);
    pool.release(Blocks{a[0]});
    EXPECT_NE(*pool.allocate(), a[0]);
    EXPECT_EQ(*pool.allocate(), a[0]);
    EXPECT_EQ(pool.find_prefix(tokens, 9), Blocks{});
    pool.publish(a[0], BlockContent::Start, text(1, 3));
    EXPECT_EQ(pool.find_prefix(tokens, 9), Blocks{}) << "another text before it";
}

TEST(BlockPool, ForgetsOnRequest) {
    BlockPool pool(4);
    const auto tokens = text(2, 1);
    const Blocks a = hold(pool, tokens);
    pool.forget(a);
    EXPECT_EQ(pool.find_prefix(tokens, 9), Blocks{});
    EXPECT_BELLOWS_ERROR(pool.take(a), Internal, "holds no text");
    check(pool, {a});
    pool.release(a);
    check(pool, {});
    EXPECT_EQ(pool.counters(), (BlockPoolCounters{.blocks = 4, .free = 4}));
}

TEST(BlockPool, PublishesFullHeldBlocksOnce) {
    BlockPool pool(2);
    const auto tokens = text(1, 1);
    EXPECT_BELLOWS_ERROR(pool.publish(0, BlockContent::Start, tokens), Internal, "nobody holds");
    const std::uint32_t block = *pool.allocate();
    EXPECT_BELLOWS_ERROR(pool.publish(block, BlockContent::Start, std::span(tokens).first(63)),
                         Internal, "before it is full");
    EXPECT_EQ(pool.publish(block, BlockContent::Unknown, tokens), BlockContent::Unknown);
    EXPECT_EQ(pool.find_prefix(tokens, 9), Blocks{});
    EXPECT_NE(pool.publish(block, BlockContent::Start, tokens), BlockContent::Unknown);
    EXPECT_BELLOWS_ERROR(pool.publish(block, BlockContent::Start, tokens), Internal, "twice");
}
