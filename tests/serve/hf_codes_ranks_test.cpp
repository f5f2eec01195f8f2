// SPDX-License-Identifier: MIT
// An FP8 folder whose experts are spread over ranks, each of which reads its own: every rank writes
// the tokens that one rank writes alone.
#include "checkpoint/coded_folder.hpp"
#include "serve/folder_model.hpp"
#include "support/mpi_test.hpp"
#include "support/temporary_folder.hpp"

namespace bellows {
namespace {

using testing::FolderModel;
using testing::world;

ModelConfig model_of_test() {
    ModelConfig m;
    m.vocabulary = 64;
    m.hidden = 136;
    m.layers = 2;
    m.dense_layers = 1;
    m.heads = 4;
    m.kv_lora_rank = 16;
    m.qk_nope_head_dim = 16;
    m.qk_rope_head_dim = 8;
    m.v_head_dim = 16;
    m.dense_ffn = 128;
    m.moe_ffn = 128;
    m.routed_experts = 6;
    m.shared_experts = 1;
    m.top_k = 2;
    m.max_context = 256;
    return m;
}

TEST(HfCodes, GiveTheSameTokensOnAnyNumberOfRanks) {
    const TemporaryFolder path;
    const testing::CodedFolder file(path.path(), model_of_test());
    const HfFolder folder(path.path());
    World alone = World::single();
    FolderModel whole(folder, alone, 32, linear_forms(folder)),
        part(folder, world(), 32, linear_forms(folder));
    std::size_t experts = 0;
    for (const Parameter& parameter : part.parameters().all()) {
        experts += parameter.info.kind == ParameterKind::Expert ? 1 : 0;
        if (parameter.quantized) {
            EXPECT_EQ(parameter.quantized->recipe, kStoredWeightsRecipe) << parameter.info.name;
        }
    }
    EXPECT_EQ(experts, 2 * 6u / static_cast<std::size_t>(world().size()));
    std::vector<std::uint32_t> text;
    for (const std::int32_t token :
         reference::random_indices(8, 11 + static_cast<std::uint64_t>(world().rank()), 64))
        text.push_back(static_cast<std::uint32_t>(token));
    while (text.size() < 32) {
        const std::vector<float> mine = part.logits(text), expected = whole.logits(text);
        const auto next = [](const std::vector<float>& logits) {
            return std::max_element(logits.end() - 64, logits.end()) - (logits.end() - 64);
        };
        ALL_RANKS_TRUE(next(mine) == next(expected));
        text.push_back(static_cast<std::uint32_t>(next(mine)));
    }
}

} // namespace
} // namespace bellows
