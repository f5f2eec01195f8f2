// SPDX-License-Identifier: MIT
// What bench_expert_exchange refuses, and that the reference its results are held to conserves
// every row.

#include "expert_exchange/options.hpp"
#include "expert_exchange/routing.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace bellows::bench {
namespace {

ExchangeOptions options_of(std::vector<std::string> words) {
    words.insert(words.begin(), "bench_expert_exchange");
    std::vector<char*> argv;
    for (std::string& word : words)
        argv.push_back(word.data());
    Arguments arguments(static_cast<int>(argv.size()), argv.data());
    return take_exchange_options(arguments);
}

TEST(BenchExpertExchange, Options) {
    const ExchangeOptions options =
        options_of({"--ranks", "4", "--topk", "6", "--dtype", "f32", "--mode", "ht", "--device",
                    "0,1", "--ranks-per-node", "2", "--flat"});
    EXPECT_EQ(name_of(options.shape), "4x1024x7168x256x6/f32");
    EXPECT_EQ(options.devices, (std::vector<std::string>{"0", "1"}));
    EXPECT_EQ(options.ranks_per_node, 2);
    EXPECT_TRUE(options.flat && !options_of({}).flat);
    EXPECT_EQ(name_of(options_of({}).shape), "2x1024x7168x256x8/bf16");
    const ExchangeShape codes = options_of({"--dtype", "fp8", "--layout", "rank"}).shape;
    EXPECT_EQ(name_of(codes), "2x1024x7168x256x8/fp8/rank");
    EXPECT_EQ(codes.dtype, DType::BF16);
    EXPECT_EQ(name_of(options_of({"--mode", "ll"}).shape), "2x1024x7168x256x8/bf16/ll");
    EXPECT_EQ(codes.token_bytes(), 7168 + 4 * 56);
    EXPECT_EQ(options_of({}).sweep, (std::vector<std::uint64_t>{1024}));
    EXPECT_EQ(options_of({"--sweep", "64:300"}).sweep, (std::vector<std::uint64_t>{64, 128, 256}));
    EXPECT_TRUE(options_of({"--filter", "^comb"}).filter.wants("combine/2x1"));
    EXPECT_FALSE(options_of({"--filter", "^comb"}).filter.wants("dispatch/2x1"));
}

TEST(BenchExpertExchange, WhatDoesNotFitIsRefused) {
    const std::vector<std::vector<std::string>> wrong = {
        {"--mode", "fast"},  {"--dtype", "f16"},
        {"--tokens", "0"},   {"--tokens", "1,2"},
        {"--hidden", "20"},  {"--topk", "65"},
        {"--experts", "7"},  {"--ranks", "0"},
        {"--ranks", "none"}, {"--seconds", "soon"},
        {"--repeats", "-1"}, {"--ranks-per-node", "0"},
        {"--fast"},          {"--json"},
        {"--layout", "any"}, {"--trace"},
        {"--ranks", "300"},  {"--sweep", "64"},
        {"--sweep", "8:4"},  {"--sweep", "0:4"},
        {"--sweep", "1:x"},  {"--filter", "("},
    };
    for (const auto& words : wrong) {
        try {
            options_of(words);
            ADD_FAILURE() << words.front() << " " << words.back();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
        }
    }
}

TEST(BenchExpertExchange, TheReferenceConservesRows) {
    const ExchangeShape shape{.ranks = 3, .tokens = 50, .hidden = 8, .experts = 7, .top_k = 4};
    const Owner owner = [](std::uint64_t expert) { return static_cast<int>(expert / 3); };
    std::set<std::vector<float>> different;
    std::uint64_t slots = 0, records = 0, pairs = 0;
    for (int rank = 0; rank < 3; ++rank) {
        const Routing routing(shape, rank);
        for (std::uint64_t token = 0; token < shape.tokens; ++token) {
            std::set<int> owners;
            std::set<std::int32_t> experts;
            for (std::uint64_t k = 0; k < shape.top_k; ++k) {
                const std::int32_t expert = routing.ids[token * shape.top_k + k];
                ASSERT_TRUE(expert >= 0 && expert < 7);
                experts.insert(expert);
                owners.insert(owner(static_cast<std::uint64_t>(expert)));
            }
            EXPECT_EQ(experts.size(), shape.top_k);
            pairs += owners.size();
            different.insert(token_values(shape, rank, token));
        }
        const Traffic traffic = traffic_of(shape, rank, owner);
        slots = std::accumulate(traffic.slots.begin(), traffic.slots.end(), slots);
        records = std::accumulate(traffic.records.begin(), traffic.records.end(), records);
    }
    EXPECT_EQ(slots, 3 * shape.slots());
    EXPECT_EQ(records, pairs);
    EXPECT_EQ(expected_rows(shape, 0, 7).size(), slots);
    EXPECT_EQ(expected_tokens(shape, 0, 3).size() + expected_tokens(shape, 3, 3).size() +
                  expected_tokens(shape, 6, 1).size(),
              records);
    EXPECT_EQ(different.size(), 3 * shape.tokens);
}

} // namespace
} // namespace bellows::bench
