// SPDX-License-Identifier: MIT
#include "app/mpirun.hpp"

#include "app/launch_folder.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {

namespace {

/// Reading and writing end.
std::pair<FileHandle, FileHandle> make_pipe(int flags) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC | flags) != 0) {
        throw Error(ErrorCode::Io, std::string("cannot make a pipe: ") + std::strerror(errno));
    }
    return {FileHandle(ends[0]), FileHandle(ends[1])};
}

/// What ProgressReporter::detect() is to think of our standard output.
std::string terminal_columns() {
    winsize size{};
    if (::isatty(STDOUT_FILENO) != 1) {
        return "0";
    }
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return std::to_string(known ? size.ws_col : 80);
}

std::vector<std::string> environment_with(const std::filesystem::path& folder) {
    const std::string ours = std::string(kLaunchFolderVariable) + "=";
    std::vector<std::string> out = {ours + folder.string(),
                                    "BELLOWS_TERMINAL=" + terminal_columns()};
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text(*entry);
        if (!text.starts_with(ours) && !text.starts_with("BELLOWS_TERMINAL=")) {
            out.emplace_back(text);
        }
    }
    return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> out;
    for (std::string& text : texts) {
        out.push_back(text.data());
    }
    out.push_back(nullptr);
    return out;
}

/// Between fork and exec: only calls that are safe there. Ends with the errno of exec in `failure`.
[[noreturn]] void become_mpirun(char** argv, char** envp, int errors, int failure,
                                const sigset_t& signals, pid_t parent) {
    ::setpgid(0, 0); // the terminal's Ctrl-C comes to the launcher, which passes it on once
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int nothing = ::open("/dev/null", O_RDONLY);
    if (::getppid() == parent && nothing >= 0 && ::dup2(nothing, STDIN_FILENO) >= 0 &&
        ::dup2(errors, STDERR_FILENO) >= 0) {
        ::pthread_sigmask(SIG_SETMASK, &signals, nullptr);
        ::execvpe(argv[0], argv, envp);
    }
    const int error = errno;
    const ssize_t ignored = ::write(failure, &error, sizeof error);
    static_cast<void>(ignored);
    ::_exit(127);
}

} // namespace

std::vector<std::string> mpirun_command(const LauncherOptions& options,
                                        const std::filesystem::path& program) {
    std::vector<std::string> command = {"mpirun", "--allow-run-as-root", "--oversubscribe",
                                        "--bind-to", "none", "--enable-recovery", "--mca",
                                        "mpi_yield_when_idle", "1",
                                        // Containers forbid reading another process's memory.
                                        "--mca", "btl_vader_single_copy_mechanism", "none", "-n",
                                        std::to_string(options.ranks), program.string()};
    command.insert(command.end(), options.arguments.begin(), options.arguments.end());
    return command;
}

MpirunProcess::MpirunProcess(const LauncherOptions& options, const std::filesystem::path& folder,
                             const sigset_t& signals) {
    std::error_code error;
    const std::filesystem::path program =
        options.program.empty() ? std::filesystem::read_symlink("/proc/self/exe", error)
                                : options.program;
    if (error || ::access(program.c_str(), X_OK) != 0) {
        throw Error(ErrorCode::Io,
                    errno_message("execute", program, error ? error.value() : errno));
    }
    std::vector<std::string> command = mpirun_command(options, program);
    std::vector<std::string> environment = environment_with(folder);
    const std::vector<char*> argv = pointers(command);
    const std::vector<char*> envp = pointers(environment);
    auto [errors, errors_end] = make_pipe(0);
    auto [failure, failure_end] = make_pipe(0);
    ::fcntl(errors.get(), F_SETFL, O_NONBLOCK);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) {
        throw Error(ErrorCode::Io, std::string("cannot start a process: ") + std::strerror(errno));
    }
    if (pid_ == 0) {
        become_mpirun(const_cast<char**>(argv.data()), const_cast<char**>(envp.data()),
                      errors_end.get(), failure_end.get(), signals, parent);
    }
    {
        const FileHandle close_writer = std::move(failure_end);
    }
    int failed_with = 0;
    if (::read(failure.get(), &failed_with, sizeof failed_with) == sizeof failed_with) {
        ::waitpid(pid_, nullptr, 0);
        throw Error(ErrorCode::Unsupported,
                    std::string("cannot start mpirun: ") + std::strerror(failed_with) +
                        "; install OpenMPI (openmpi-bin), or start the ranks with your own MPI");
    }
    errors_ = std::move(errors);
}

MpirunProcess::~MpirunProcess() {
    if (!exit_code()) {
        send(SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
}

void MpirunProcess::send(int signal) const {
    if (!exit_code_) {
        ::kill(pid_, signal);
    }
}

std::optional<int> MpirunProcess::exit_code() {
    int status = 0;
    if (!exit_code_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
        exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return exit_code_;
}

void MpirunProcess::pass_errors() {
    std::array<char, 4096> piece{};
    ssize_t got = 0;
    std::string out;
    while (errors_.get() >= 0 && (got = ::read(errors_.get(), piece.data(), piece.size())) > 0) {
        for (const char c : std::string_view(piece.data(), static_cast<std::size_t>(got))) {
            if (at_line_start_ && (c == '[' || !held_.empty())) {
                held_ += c; // until the line shows what it is
                if (c != '\n' && held_.size() < 512) {
                    continue;
                }
                if (held_.find("] PMIX ERROR: ") == std::string::npos) {
                    out += held_;
                }
                at_line_start_ = c == '\n';
                held_.clear();
                continue;
            }
            out += c;
            at_line_start_ = c == '\n';
        }
    }
    if (errors_.get() >= 0 && got == 0) {
        out += std::exchange(held_, {}); // no more will come
        errors_ = FileHandle();
    }
    const char* at = out.data();
    std::size_t left = out.size();
    while (left > 0) {
        const ssize_t written = ::write(STDERR_FILENO, at, left);
        if (written < 0 && errno != EINTR) {
            return; // nobody listens
        }
        at += std::max<ssize_t>(written, 0);
        left -= static_cast<std::size_t>(std::max<ssize_t>(written, 0));
    }
}

} // namespace bellows
