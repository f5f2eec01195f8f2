// SPDX-License-Identifier: MIT
// Attention within documents: a sequence of several learns what sequences of one each learn.
#include "support/mpi_test.hpp"
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"
#include "train/documents.hpp"

#include <bellows/train/trainer.hpp>

#include <cmath>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

constexpr std::uint32_t kEnd = 63;
constexpr std::uint64_t kDocument = 8, kDocuments = 3; ///< tokens of each, in a sequence

/// Token `at` of the text that sequence `index` of kDocuments documents is of.
std::uint32_t token_at(std::uint64_t step, std::uint64_t index, std::uint64_t at) {
    if (at % kDocument == kDocument - 1)
        return kEnd;
    return static_cast<std::uint32_t>((step + index * 7 + at * at) % 61);
}
void packed(std::uint64_t step, std::uint64_t index, std::span<std::uint32_t> tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = token_at(step, index, i);
}
/// The same documents, one in each sequence.
void apart(std::uint64_t step, std::uint64_t index, std::span<std::uint32_t> tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = token_at(step, index / kDocuments, index % kDocuments * kDocument + i);
}

RunConfig run_of(AttentionKind attention) {
    RunConfig run = small_run();
    run.train.lr = 1e-2;
    run.train.seq = kDocuments * kDocument;
    run.train.micro_batches = world().size() == 1 ? 1 : 4;
    run.train.document_mask = true;
    if (attention == AttentionKind::Gqa) {
        ModelConfig& m = run.model;
        m.attention = attention;
        m.kv_lora_rank = m.qk_nope_head_dim = m.qk_rope_head_dim = m.v_head_dim = 0;
        m.heads = 4;
        m.kv_heads = 2;
        m.head_dim = 8;
    }
    return run;
}

class DocumentMask : public ::testing::TestWithParam<AttentionKind> {
protected:
    const std::unique_ptr<Device> device_ = testing::make_device(testing::test_options());
};

TEST_P(DocumentMask, PackedDocumentsLearnWhatSequencesOfOneLearn) {
    const RunConfig config = run_of(GetParam());
    RunConfig one_each = config;
    one_each.train.seq = kDocument;
    one_each.train.batch *= kDocuments;
    one_each.train.document_mask = false;
    RunConfig without = config;
    without.train.document_mask = false;
    const RunLayout layout{static_cast<std::uint32_t>(world().size()), 1, 1}; // every stage masks
    Trainer masked(*device_, world(), config, layout), single(*device_, world(), one_each, layout),
        unmasked(*device_, world(), without, layout);
    masked.end_documents_with(kEnd);
    for (std::uint64_t step = 0; step < 3; ++step) {
        const StepResult a = masked.step(step, packed);
        const StepResult b = single.step(step, apart);
        const StepResult c = unmasked.step(step, packed);
        device_->wait_idle();
        // Positions of a document are others, but only their distances count.
        ALL_RANKS_TRUE(std::abs(a.loss - b.loss) <= 1e-4 * b.loss);
        ALL_RANKS_TRUE(std::abs(a.grad_norm - b.grad_norm) <= 2e-3 * b.grad_norm);
        ALL_RANKS_TRUE(std::abs(a.loss - c.loss) > 1e-4 * c.loss || step == 0);
        ALL_RANKS_TRUE(std::abs(a.grad_norm - c.grad_norm) > 2e-3 * c.grad_norm || step == 0);
        ALL_RANKS_TRUE(a.visible_keys == (kDocument + 1) / 2.0);
        ALL_RANKS_TRUE(!c.visible_keys.has_value());
    }
    ALL_RANKS_TRUE(std::abs(masked.held_out_loss(packed, 3) -
                            single.held_out_loss(apart, 3 * kDocuments)) < 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Attention, DocumentMask,
                         ::testing::Values(AttentionKind::Mla, AttentionKind::Gqa),
                         [](const auto& of) { return std::string(to_string(of.param)); });

TEST(Documents, NeedTheTokenThatEndsThem) {
    const auto device = testing::make_device(testing::test_options());
    World single = World::single();
    Trainer trainer(*device, single,
                    [] {
                        RunConfig run = run_of(AttentionKind::Mla);
                        run.train.micro_batches = 1;
                        return run;
                    }(),
                    {});
    EXPECT_BELLOWS_ERROR(trainer.step(0, packed), InvalidArgument, "end_documents_with");
}

TEST(Documents, EndWithATokenOrTheirSequence) {
    const std::vector<std::uint32_t> tokens = {1, 9, 2, 3, 9, /**/ 9, 4, 5, 6, 7};
    const std::vector<std::uint32_t> ends = documents_of(tokens, 5, 9);
    EXPECT_EQ(ends, (std::vector<std::uint32_t>{0, 2, 0, 2, 2, 5, 2, 5, 2, 5, //
                                                0, 1, 1, 5, 1, 5, 1, 5, 1, 5}));
    EXPECT_EQ(visible_keys(ends), 3u + 6 + 1 + 10);
    EXPECT_EQ(documents_of({}, 5, 9).size(), 0u);
}

} // namespace
} // namespace bellows
