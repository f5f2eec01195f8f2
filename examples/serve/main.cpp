// SPDX-License-Identifier: MIT
// A model that answers three requests at once: each has settings of its own, the text of the first
// is shown as it grows, and the third is cancelled on the way.
//
//   ./serve [FOLDER [PROMPT]]
//
// FOLDER is a checkpoint of a run or a Hugging Face folder. Without it, or with "", a small model
// with random weights answers in random bytes.

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>
#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/serve/engine.hpp>

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace {

constexpr std::size_t kRequests = 3, kCancelled = 2;

unsigned long long count(std::uint64_t number) { // for %llu
    return number;
}

bellows::ModelConfig small_model() {
    bellows::ModelConfig model;
    model.vocabulary = 256; // bytes
    model.hidden = 64;
    model.layers = 2;
    model.dense_layers = 1; // the first has a dense FFN, the second has experts
    model.heads = 2;
    model.kv_lora_rank = 32;
    model.qk_nope_head_dim = 16;
    model.qk_rope_head_dim = 16;
    model.v_head_dim = 16;
    model.dense_ffn = 128;
    model.moe_ffn = 64;
    model.routed_experts = 4;
    model.shared_experts = 1;
    model.top_k = 2;
    return model;
}

/// A Hugging Face folder brings its tokenizer along, and so do checkpoints of runs that have one.
bellows::Tokenizer tokenizer_of(const std::string& folder) {
    if (folder.empty())
        return bellows::Tokenizer::bytes();
    if (bellows::HfFolder::is_one(folder))
        return bellows::Tokenizer::from_folder(folder);
    const auto checkpoint = bellows::Checkpoint::open(folder);
    return checkpoint.has_text(bellows::kTokenizerFile)
               ? bellows::Tokenizer::from_model(checkpoint.text(bellows::kTokenizerFile), folder)
               : bellows::Tokenizer::bytes();
}

int run(const std::string& folder, const std::string& prompt) {
    const bellows::Tokenizer tokenizer = tokenizer_of(folder);
    bellows::EngineOptions options;
    options.max_context = 512;
    options.max_sequences = kRequests;
    options.tokenizer = &tokenizer; // answers come as text, too
    const bellows::DeviceOptions device;
    const auto engine = folder.empty()
                            ? std::make_unique<bellows::Engine>(device, small_model(), 1, options)
                            : std::make_unique<bellows::Engine>(device, folder, options);

    std::array<bellows::Request, kRequests> requests;
    for (bellows::Request& request : requests) {
        request.prompt = tokenizer.encode(prompt, {.text_frame = true});
        request.max_tokens = 48;
        request.end_tokens = tokenizer.end_tokens();
    }
    requests[0].sampling = {.temperature = 0.8, .top_p = 0.95}; // draws among the likeliest tokens
    requests[1].sampling = {.temperature = 0, .repetition_penalty = 1.2}; // takes the likeliest
    requests[2].sampling = {.temperature = 1, .seed = 7};

    std::array<bellows::RequestId, kRequests> ids;
    for (std::size_t i = 0; i < kRequests; ++i)
        ids[i] = engine->submit(requests[i]);
    std::array<bellows::AnswerPart, kRequests> last;
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    while (engine->step()) {
        for (std::size_t i = 0; i < kRequests; ++i) {
            if (last[i].reason != bellows::FinishReason::None)
                continue; // it has ended, and the engine knows it no more
            if (i == kCancelled && last[i].usage.answer >= 8)
                engine->cancel(ids[i]);
            last[i] = engine->poll(ids[i]);
            if (i == 0) // without characters that would steer a terminal
                std::fputs(bellows::printable(last[i].text, "\n\t").c_str(), stdout);
        }
    }
    const bellows::EngineCounters counters = engine->counters();
    std::printf(
        "\n%llu steps of %llu tokens in all, %llu of them drawn; %llu of %llu blocks in use\n",
        count(counters.steps), count(counters.computed_tokens), count(counters.generated_tokens),
        count(counters.blocks.used), count(counters.blocks.blocks));
    for (std::size_t i = 0; i < kRequests; ++i)
        std::printf("request %llu: %s, prompt %llu tokens, answer %llu tokens\n", count(ids[i]),
                    to_string(last[i].reason), count(last[i].usage.prompt),
                    count(last[i].usage.answer));
    return counters.blocks.used == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "A bellows is a bag of ");
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "serve: %s\n", error.what());
        return 3;
    }
}
