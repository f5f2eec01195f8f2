// SPDX-License-Identifier: MIT
#pragma once

// Training runs of a very small model in a folder of their own, and what the tests look at
// afterwards: losses, checkpoints, the files of a folder.

#include "e2e/command.hpp"
#include "support/temporary_folder.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace bellows::e2e {

using Flags = std::vector<std::string>;

/// Hidden size 32, three layers (one dense, two of four experts), 8 sequences of 32 bytes a step.
inline constexpr std::uint64_t kLayers = 3;

/// A step as metrics.jsonl has it.
struct Step {
    std::uint64_t step = 0;
    double loss = 0;
    std::string printed; ///< step, loss and gradient norm, letter by letter
};

class Workspace {
public:
    /// Writes the configuration and a corpus of about 20 kB.
    Workspace();

    const std::filesystem::path& path() const { return folder_.path(); }
    std::filesystem::path config() const { return path() / "small.toml"; }
    std::filesystem::path data() const { return path() / "corpus.txt"; }
    /// Another configuration: `from`, which must stand in small.toml, is replaced.
    std::filesystem::path edited_config(const std::string& from, const std::string& to) const;
    std::filesystem::path write(const std::string& name, std::string_view content) const {
        return folder_.write(name, content);
    }

    /// `bellows ARGUMENTS`, in a scratch folder of its own.
    Finished bellows(const Flags& arguments, const Environment& environment = {}) const;
    /// The same, but does not wait.
    Command start(const Flags& arguments, const Environment& environment = {}) const;
    /// A command that is not bellows itself: an absolute path and arguments.
    Finished run(const Flags& command, const Environment& environment = {}) const;
    /// The same, but does not wait.
    Command start_command(const Flags& command, const Environment& environment = {}) const;
    /// `train` of the small model and corpus into path()/name, with `flags` behind.
    Flags train_arguments(const std::string& name, const Flags& flags) const;
    /// Runs it to a good end and returns its folder; a test failure if it does not come to one.
    std::filesystem::path train(const std::string& name, const Flags& flags,
                                const Environment& environment = {}) const;

private:
    std::filesystem::path scratch() const;

    TemporaryFolder folder_;
    mutable int scratches_ = 0;
};

/// What a user's own `mpirun -n 2` wants on a machine like that of the tests: root, few cores.
Environment for_mpirun();

/// The steps of a run so far; only whole lines count.
std::vector<Step> steps_of(const std::filesystem::path& run);
/// Their `printed` texts.
std::vector<std::string> printed_steps(const std::filesystem::path& run);

/// Both checkpoints (a run's folder: its newest) have the same tensors, byte for byte: parameters
/// and moments. Otherwise which one differs first.
testing::AssertionResult same_tensors(const std::filesystem::path& a,
                                      const std::filesystem::path& b);

/// Relative path and content of every file below.
std::map<std::string, std::string> files_below(const std::filesystem::path& folder);

/// Exit code `code` and one line on standard error, which begins with "bellows: " and has `part`.
void expect_one_line(const Finished& finished, int code, std::string_view part);

} // namespace bellows::e2e
