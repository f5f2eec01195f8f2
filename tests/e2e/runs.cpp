// SPDX-License-Identifier: MIT
#include "e2e/runs.hpp"

#include <bellows/checkpoint/checkpoint.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace bellows::e2e {

namespace fs = std::filesystem;

namespace {

constexpr const char* kConfig = R"([model]
vocabulary = 256
hidden = 32
layers = 3
dense_layers = 1
heads = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
dense_ffn = 64
moe_ffn = 32
routed_experts = 4
shared_experts = 1
top_k = 2
n_group = 1
topk_group = 1
score_function = "sigmoid"
normalize_top_k = true
router_bias = true
bias_update_rate = 0.01
init_std = 0.06
head_init_std = 0.04

[train]
batch = 8
seq = 32
lr = 3e-3
warmup_steps = 4
sample_tokens = 8
)";

/// Sentences from few words: something to learn in a dozen steps.
std::string corpus() {
    constexpr std::array<const char*, 8> kWords = {"the",  "bellows", "breathe", "and",
                                                   "slow", "embers",  "glow",    "again"};
    std::string text;
    std::uint64_t state = 1;
    while (text.size() < 20'000) {
        for (int word = 0; word < 9; ++word) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text += std::string(word == 0 ? "" : " ") + kWords[(state >> 33) % kWords.size()];
        }
        text += ".\n";
    }
    return text;
}

std::vector<std::byte> bytes_of(const Checkpoint& checkpoint, const char* base,
                                const std::string& name) {
    const SafetensorsReader& reader = checkpoint.require(base, name);
    std::vector<std::byte> bytes(reader.find(name)->bytes);
    reader.read(name, bytes);
    return bytes;
}

} // namespace

Workspace::Workspace() {
    write("small.toml", kConfig);
    write("corpus.txt", corpus());
}

fs::path Workspace::edited_config(const std::string& from, const std::string& to) const {
    std::string text = kConfig;
    const std::size_t at = text.find(from);
    if (at == std::string::npos)
        throw std::runtime_error("\"" + from + "\" does not stand in small.toml");
    return write("edited.toml", text.replace(at, from.size(), to));
}

Environment for_mpirun() {
    return {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
            {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
            {"PRTE_ALLOW_RUN_AS_ROOT", "1"},
            {"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
            {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
            {"OMPI_MCA_hwloc_base_binding_policy", "none"},
            {"PRTE_MCA_hwloc_default_binding_policy", "none"},
            {"OMPI_MCA_mpi_yield_when_idle", "1"},
            {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"},
            {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"}};
}

fs::path Workspace::scratch() const {
    const fs::path folder = path() / ("scratch-" + std::to_string(++scratches_));
    fs::create_directory(folder);
    return folder;
}

Finished Workspace::run(const Flags& command, const Environment& environment) const {
    return start_command(command, environment).wait();
}

Command Workspace::start_command(const Flags& command, const Environment& environment) const {
    return Command(scratch(), command, environment);
}

Command Workspace::start(const Flags& arguments, const Environment& environment) const {
    Flags command = {program()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Command(scratch(), command, environment);
}

Finished Workspace::bellows(const Flags& arguments, const Environment& environment) const {
    return start(arguments, environment).wait();
}

Flags Workspace::train_arguments(const std::string& name, const Flags& flags) const {
    Flags arguments = {"train",         "--config", config().string(),       "--data",
                       data().string(), "--out",    (path() / name).string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return arguments;
}

fs::path Workspace::train(const std::string& name, const Flags& flags,
                          const Environment& environment) const {
    const Finished finished = bellows(train_arguments(name, flags), environment);
    EXPECT_EQ(finished.exit_code, 0) << name << ": " << finished.out << finished.errors;
    EXPECT_EQ(finished.errors, "") << name;
    return path() / name;
}

std::vector<Step> steps_of(const fs::path& run) {
    std::vector<Step> steps;
    const std::string text = content_of(run / "metrics.jsonl");
    for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::string line = text.substr(at, end - at);
        const auto json = nlohmann::json::parse(line);
        steps.push_back({json.at("step").get<std::uint64_t>(), json.at("loss").get<double>(),
                         line.substr(0, line.find(",\"lr\""))});
        EXPECT_NE(steps.back().printed.find("grad_norm"), std::string::npos) << line;
    }
    return steps;
}

std::vector<std::string> printed_steps(const fs::path& run) {
    std::vector<std::string> printed;
    for (const Step& step : steps_of(run))
        printed.push_back(step.printed);
    return printed;
}

testing::AssertionResult same_tensors(const fs::path& a, const fs::path& b) {
    const Checkpoint left = Checkpoint::open(a);
    const Checkpoint right = Checkpoint::open(b);
    for (const char* base : {"model", "optimizer"}) {
        const auto tensors = left.tensors(base), others = right.tensors(base);
        if (tensors.empty() || tensors.size() != others.size())
            return testing::AssertionFailure() << base << ": " << tensors.size() << " tensors, "
                                               << others.size() << " in the other";
        for (const StoredTensor& tensor : tensors) {
            const auto mine = bytes_of(left, base, tensor.name);
            const auto theirs = bytes_of(right, base, tensor.name);
            if (mine == theirs)
                continue;
            const auto at = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
            return testing::AssertionFailure()
                   << tensor.name << " differs first in byte " << at.first - mine.begin() << " of "
                   << mine.size() << " (" << theirs.size() << ")";
        }
    }
    return testing::AssertionSuccess();
}

std::map<std::string, std::string> files_below(const fs::path& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_regular_file())
            files[fs::relative(entry.path(), folder).string()] = content_of(entry.path());
    return files;
}

void expect_one_line(const Finished& finished, int code, std::string_view part) {
    EXPECT_EQ(finished.exit_code, code) << finished.out << finished.errors;
    EXPECT_EQ(std::count(finished.errors.begin(), finished.errors.end(), '\n'), 1)
        << finished.errors;
    EXPECT_EQ(finished.errors.rfind("bellows: ", 0), 0u) << finished.errors;
    EXPECT_NE(finished.errors.find(part), std::string::npos) << finished.errors;
}

} // namespace bellows::e2e
