// SPDX-License-Identifier: MIT
// The body of `bellows generate`: one rank, the whole model, each token computed from the last
// `seq` tokens of the text.
#include "app/run.hpp"

#include "app/run_checkpoint.hpp"
#include "app/run_device.hpp"
#include "app/sampling.hpp"

#include <bellows/comm/message.hpp>
#include <bellows/engine/error.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/model/stage.hpp>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <vector>

namespace bellows {

namespace {

/// The model of a checkpoint, ready to say what comes next.
class Writer {
public:
    explicit Writer(const GenerateOptions& options);

    /// Logits of the token after `text`, of which the last seq tokens count.
    std::vector<float> next(std::span<const std::uint32_t> text);

private:
    RunConfig config_;
    World world_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    std::optional<HostThread> thread_;
    std::optional<ParameterStore> parameters_;
    std::optional<ExpertExchange> exchange_;
    std::optional<Stage> stage_;
};

Writer::Writer(const GenerateOptions& options)
    : config_(options.config), world_(World::single()),
      device_(Device::create(run_device_options(config_.train.device, 0))),
      transport_(open_transport(world_)) {
    const DType act = config_.train.precision == "bf16" ? DType::BF16 : DType::F32;
    thread_.emplace(*device_, "exchange");
    parameters_.emplace(*device_, parameters_of_stage(config_.model, 0, 1, 0, 1), act);
    const Checkpoint checkpoint = Checkpoint::open(options.checkpoint);
    if (act == DType::BF16)
        use_gemm_class(*device_, gemm_class_of(checkpoint, device_->options()));
    load_weights(checkpoint, *parameters_);
    if (config_.model.moe_layers() > 0)
        exchange_.emplace(*device_, world_, *transport_, *thread_,
                          ExchangeConfig{.name = "experts",
                                         .num_experts = config_.model.routed_experts,
                                         .top_k = config_.model.top_k,
                                         .hidden = config_.model.hidden,
                                         .max_tokens = config_.train.seq,
                                         .dtype = act});
    StageDesc desc;
    desc.config = config_.model;
    desc.seq = config_.train.seq;
    desc.training = false;
    stage_.emplace(desc, *parameters_, exchange_ ? &*exchange_ : nullptr);
}

std::vector<float> Writer::next(std::span<const std::uint32_t> text) {
    const std::uint64_t seq = config_.train.seq;
    const std::uint64_t used = std::min<std::uint64_t>(text.size(), seq);
    const auto tokens = stage_->token_buffer(0).mapped_as<std::uint32_t>();
    std::fill(tokens.begin(), tokens.end(), 0u); // after the text; causality hides it
    std::copy(text.end() - static_cast<std::ptrdiff_t>(used), text.end(), tokens.begin());
    for (const Node* node : stage_->nodes(0, NodeKind::Forward))
        node->submit();
    device_->wait_idle(wait_limit(config_.train));
    const auto logits = stage_->logits_buffer(0).mapped_as<const float>();
    const std::uint64_t vocabulary = config_.model.vocabulary;
    const auto row = logits.subspan((used - 1) * vocabulary, vocabulary);
    return {row.begin(), row.end()};
}

} // namespace

std::string generate_text(const GenerateOptions& options) {
    const Tokenizer tokenizer = Tokenizer::from_name(options.config.train.tokenizer);
    std::vector<std::uint32_t> text = tokenizer.encode(options.prompt);
    if (text.empty())
        text.push_back(tokenizer.end_of_document());
    Writer writer(options);
    const SamplingParams sampling{options.temperature, options.seed};
    for (std::uint64_t i = 0; i < options.tokens; ++i)
        text.push_back(sample_token(writer.next(text), sampling, text.size()));
    return tokenizer.decode(text);
}

WordSet words_of(const Corpus& corpus, const Tokenizer& tokenizer) {
    constexpr std::uint64_t kPart = 1 << 20; // a word at the seam becomes two
    WordSet words;
    const std::uint64_t end = std::min(corpus.num_tokens(), 64 * kPart);
    for (std::uint64_t first = 0; first < end; first += kPart) {
        std::vector<std::uint32_t> tokens(std::min(kPart, end - first));
        corpus.copy(first, tokens);
        words.add(tokenizer.decode(tokens));
    }
    return words;
}

int run_generate(const GenerateOptions& options) {
    std::optional<WordSet> known;
    if (!options.known_text.empty()) { // a bad path shows before the work
        const Tokenizer bytes = Tokenizer::from_name("bytes");
        const std::vector<std::filesystem::path> paths(options.known_text.begin(),
                                                       options.known_text.end());
        known = words_of(Corpus::read(paths, bytes), bytes);
    }
    const std::string text = generate_text(options);
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
    if (known) // what the model wrote, not what it was given
        std::fprintf(stderr, "%s\n",
                     format_word_check(check_words(std::string_view(text).substr(std::min(
                                                       options.prompt.size(), text.size())),
                                                   *known),
                                       "the given text")
                         .c_str());
    return 0;
}

} // namespace bellows
