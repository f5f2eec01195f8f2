// SPDX-License-Identifier: MIT
#pragma once

// What the subcommands of `bellows` are told after all input has been checked. The bodies that
// need a device are handed in as functions; a subcommand without one does not exist.

#include <bellows/base/files.hpp>
#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/serve/engine.hpp>
#include <bellows/serve/request.hpp>
#include <bellows/text/corpus.hpp>
#include <bellows/train/train_config.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// Everything that one rank of a training run must know. Checked: the model, the numbers, the
/// layout, the data, the checkpoint to resume from.
struct TrainOptions {
    std::string config_name; ///< preset or file, for messages and titles
    RunConfig config;
    RunLayout layout;
    std::filesystem::path out;
    std::optional<std::filesystem::path> resume; ///< Checkpoint::folder()
    bool keeps_tokenizer = false;                ///< that of `resume`
    std::optional<std::filesystem::path> init;   ///< a Hugging Face folder with the first weights
    /// What config.toml in --out says: the run as it is, flags included.
    std::string config_text() const { return to_toml(config); }
    std::uint64_t ranks() const { return std::uint64_t{layout.pp} * layout.dp; }
};

/// How an answer is written.
struct TextOptions {
    std::uint64_t tokens = 200; ///< at most
    SamplingParams sampling{.temperature = 0.8};
    std::vector<std::string> stop;   ///< texts at which it ends, without them
    std::vector<std::uint32_t> ends; ///< token ids at which it ends, besides the tokenizer's
    bool ignore_end = false;         ///< it goes on behind these
};

struct GenerateOptions {
    std::filesystem::path checkpoint; ///< Checkpoint::folder()
    RunConfig config;                 ///< of the run that wrote it; precision as asked for
    std::string tokenizer;            ///< see Tokenizer::from_name(); "": the checkpoint's own
    std::uint64_t folder_bytes = 0;   ///< of the tensors of a Hugging Face folder; 0: it is none
    std::vector<std::string> prompts; ///< at least one, but of chat
    std::string system;               ///< what a system message says; "": there is none
    bool chat = false; ///< prompts are what a user says, and the text is the model's answer
    TextOptions text;
    std::uint64_t context = 0; ///< tokens of prompt and answer that the model sees; 0: as needed
    std::optional<DType> cache_type{};
    bool exact = false;
    DraftKind draft = DraftKind::None;
    std::uint64_t ranks = 1;                            ///< that share the prompts and the experts
    std::vector<std::vector<std::int32_t>> placement{}; ///< EngineOptions::placement
    bool allow_degraded = false;                        ///< a lost rank does not end the others
    bool json = false;                                  ///< an object in a line for each prompt
    bool show_times = false;                            ///< in a chat, after each answer
    std::vector<std::string> known_text; ///< say how many of the words stand there; empty: do not
};

struct InfoOptions {
    bool json = false;
    std::string device;   ///< this one alone (see DeviceOptions::select); "": all
    bool kernels = false; ///< how FP8 products are computed and how fast, measured once
    bool retune = false;  ///< measured again
};

struct SelftestOptions {
    std::optional<std::filesystem::path> json; ///< write the report there, too
    std::string device = "any";                ///< see parse_devices(); "any": the best one
};

/// Each returns an exit code or throws bellows::Error.
struct Commands {
    std::function<int(const TrainOptions&)> train;
    std::function<int(const GenerateOptions&)> generate;
    std::function<int(const GenerateOptions&)> chat;
    std::function<int(const InfoOptions&)> info; ///< devices; `info --model` works without
    std::function<int(const SelftestOptions&)> selftest;
};

/// Rank 0 prepares this before the first step.
struct PreparedOutput {
    FileHandle lock; ///< no other run writes to the folder while it lives
    /// Where the run goes on in place from another than its newest checkpoint: the newer ones,
    /// which have been set aside.
    std::vector<std::filesystem::path> set_aside;
};
/// Makes and locks the run's folder and writes config.toml. Throws Error{InvalidArgument} when
/// another run has the folder, Error{Io}.
PreparedOutput prepare_output(const TrainOptions& options);

/// Throws Error{InvalidArgument} if the tokenizer has more ids than the model.
void check_vocabulary(const ModelConfig& model, const Tokenizer& tokenizer);

/// The configuration of the run that wrote a checkpoint. Throws as parse_run_config() does.
RunConfig config_of(const Checkpoint& checkpoint);
/// Its tokenizer: of the file inside the checkpoint, or, where an older version wrote it, as the
/// configuration says.
Tokenizer tokenizer_of(const Checkpoint& checkpoint, const TrainConfig& config);
/// The tokenizer of a training run. Throws like Tokenizer::from_name() and check_vocabulary().
Tokenizer tokenizer_of(const TrainOptions& options);

/// Throws Error{InvalidArgument} if the text is too short to train on, or to keep the wanted part
/// out of training.
void check_text(const TrainConfig& train, const Corpus& corpus);

/// main(): reads the arguments, checks all input, starts the ranks if asked to, runs the
/// subcommand. Results go to standard output, one line per error to standard error. Returns the
/// exit code.
int run_command_line(int argc, const char* const* argv, const Commands& commands);

} // namespace bellows
