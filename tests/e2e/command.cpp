// SPDX-License-Identifier: MIT
#include "e2e/command.hpp"

#include "support/temporary_folder.hpp"

#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows::e2e {

namespace fs = std::filesystem;

namespace {

constexpr std::chrono::milliseconds kPause{2};
constexpr std::chrono::seconds kLeftOverLimit{3}; // for the system to clear ended processes away

std::string new_mark() {
    static std::atomic<int> count{0};
    return "BELLOWS_TEST_MARK=" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

/// NAME=value of everything that the command is to see.
std::vector<std::string> environment_of(const fs::path& scratch, const std::string& mark,
                                        const Environment& over) {
    Environment all = {{"TMPDIR", scratch.string()}};
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string_view text(*entry);
        const std::size_t at = text.find('=');
        if (at != std::string_view::npos)
            all.emplace(text.substr(0, at), text.substr(at + 1));
    }
    all["TMPDIR"] = scratch.string();
    all["XDG_CACHE_HOME"] = BELLOWS_CACHE_FOLDER; // not the user's
    all.emplace("BELLOWS_CHECK", "1");            // happens-before checker
    for (const auto& [name, value] : over)
        all[name] = value;
    std::vector<std::string> out = {mark};
    for (const auto& [name, value] : all)
        out.push_back(name + "=" + value);
    return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> out;
    for (std::string& text : texts)
        out.push_back(text.data());
    out.push_back(nullptr);
    return out;
}

/// Between fork and exec. When the test is killed, the command is told to end.
[[noreturn]] void become(char** argv, char** envp, const char* out, const char* errors,
                         pid_t parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    const int in = ::open("/dev/null", O_RDONLY);
    const int to_out = ::open(out, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    const int to_errors = ::open(errors, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    if (::getppid() == parent && ::dup2(in, 0) == 0 && ::dup2(to_out, 1) == 1 &&
        ::dup2(to_errors, 2) == 2)
        ::execve(argv[0], argv, envp);
    ::_exit(127);
}

} // namespace

std::string program() {
    const char* driver = std::getenv("BELLOWS_TEST_DRIVER");
    return driver != nullptr && std::string_view(driver) == "new" ? BELLOWS_PROGRAM_NEW
                                                                  : BELLOWS_PROGRAM;
}

std::string mpirun() {
    return BELLOWS_MPIRUN;
}

void pause_shortly() {
    std::this_thread::sleep_for(kPause);
}

Command::Command(const fs::path& scratch, const std::vector<std::string>& command,
                 const Environment& environment)
    : scratch_(scratch), mark_(new_mark()), out_(scratch / "out"), errors_(scratch / "errors") {
    if (::access(command.at(0).c_str(), X_OK) != 0)
        throw std::runtime_error("no program at " + command.at(0));
    std::vector<std::string> arguments = command;
    std::vector<std::string> variables = environment_of(scratch, mark_, environment);
    const std::vector<char*> argv = pointers(arguments);
    const std::vector<char*> envp = pointers(variables);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0)
        throw std::runtime_error("cannot start a process");
    if (pid_ == 0)
        become(const_cast<char**>(argv.data()), const_cast<char**>(envp.data()), out_.c_str(),
               errors_.c_str(), parent);
}

Command::~Command() {
    kill_all();
    if (!ended_) {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
}

bool Command::is_running() {
    int status = 0;
    if (!ended_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return !ended_;
}

Finished Command::wait(std::chrono::seconds limit) {
    const auto give_up = std::chrono::steady_clock::now() + limit;
    while (is_running() && std::chrono::steady_clock::now() < give_up)
        pause_shortly();
    Finished result;
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (is_running())
        ADD_FAILURE() << "still running after " << limit.count() << " s: " << out() << errors();
    else
        result.exit_code = exit_code_;
    const auto clear = std::chrono::steady_clock::now() + kLeftOverLimit;
    while (ended_ && !marked_processes().empty() && std::chrono::steady_clock::now() < clear)
        pause_shortly();
    const std::vector<pid_t> left = marked_processes();
    EXPECT_TRUE(left.empty()) << left.size() << " processes are left, the first is "
                              << left.front();
    kill_all();
    result.out = out();
    result.errors = errors();
    for (const auto& entry : fs::directory_iterator(scratch_))
        EXPECT_NE(entry.path().filename().string().rfind("bellows-", 0), 0u)
            << entry.path() << " is left";
    return result;
}

pid_t Command::rank_process(int rank) const {
    const std::string wanted = "OMPI_COMM_WORLD_RANK=" + std::to_string(rank);
    for (const pid_t pid : marked_processes()) {
        const std::string text = '\0' + content_of("/proc/" + std::to_string(pid) + "/environ");
        if (text.find('\0' + wanted + '\0') != std::string::npos)
            return pid;
    }
    return 0;
}

std::string Command::out() const {
    return content_of(out_);
}
std::string Command::errors() const {
    return content_of(errors_);
}

std::vector<pid_t> Command::marked_processes() const {
    std::vector<pid_t> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
        const std::string name = entry.path().filename().string();
        pid_t pid = 0;
        const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
        if (error != std::errc() || end != name.data() + name.size() || pid == ::getpid())
            continue;
        // Unreadable or gone: not ours. A process that waits to be collected has none.
        if (content_of(entry.path() / "environ").find(mark_ + '\0') != std::string::npos)
            found.push_back(pid);
    }
    return found;
}

void Command::kill_all() const {
    for (const pid_t pid : marked_processes())
        ::kill(pid, SIGKILL);
}

} // namespace bellows::e2e
