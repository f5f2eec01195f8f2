// SPDX-License-Identifier: MIT

// The parent's side of launch.hpp: mpirun as a child, its standard error, the ranks' reports.

#include <bellows/comm/launch.hpp>

#include "deadline.hpp"
#include "launch_report.hpp"
#include "socket.hpp"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <optional>
#include <poll.h>
#include <set>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {
namespace {

constexpr Milliseconds kTick{50};
constexpr Milliseconds kKillAfterTerm{5000};
constexpr Milliseconds kLookAtRanks{500};
constexpr Milliseconds kOneSignal{500};
constexpr int kPeerLostExit = 4;

struct Pipe {
    FileDescriptor read, write;
    Pipe() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0)
            throw net::errno_error("cannot create a pipe", errno);
        read = FileDescriptor(ends[0]);
        write = FileDescriptor(ends[1]);
    }
};

// SIGINT and SIGTERM as readable events while it lives.
class SignalWatch {
public:
    SignalWatch() {
        sigset_t watched;
        sigemptyset(&watched);
        sigaddset(&watched, SIGINT);
        sigaddset(&watched, SIGTERM);
        ::pthread_sigmask(SIG_BLOCK, &watched, &before_);
        fd_ = FileDescriptor(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    }
    ~SignalWatch() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalWatch(const SignalWatch&) = delete;
    SignalWatch& operator=(const SignalWatch&) = delete;

    int fd() const { return fd_.get(); }
    const sigset_t& mask_before() const { return before_; }
    int take() {
        signalfd_siginfo info{};
        const bool one = ::read(fd_.get(), &info, sizeof info) == sizeof info;
        return one ? static_cast<int>(info.ssi_signo) : 0;
    }

private:
    sigset_t before_{};
    FileDescriptor fd_;
};

// Passes standard error on line by line, less what mpirun says about processes that it has lost:
// that is told better by the ranks that survived.
class StderrRelay {
public:
    void take(int fd) {
        std::array<char, 4096> chunk;
        ssize_t got = 0;
        while ((got = ::read(fd, chunk.data(), chunk.size())) > 0)
            pending_.append(chunk.data(), static_cast<std::size_t>(got));
        std::size_t start = 0;
        for (std::size_t end; (end = pending_.find('\n', start)) != std::string::npos;
             start = end + 1)
            pass(std::string_view(pending_).substr(start, end + 1 - start));
        pending_.erase(0, start);
        // A progress line without an end must show, too.
        if (!pending_.empty() && pending_.front() != '[')
            finish();
    }
    void finish() {
        pass(pending_);
        pending_.clear();
    }

private:
    static void pass(std::string_view line) {
        for (const char* noise :
             {"PMIX ERROR: BAD-PARAM in file", "PMIX ERROR: PMIX_ERR_BAD_PARAM"})
            if (line.find(noise) != std::string_view::npos)
                return;
        while (!line.empty()) {
            const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
            if (written < 0 && errno != EINTR)
                return;
            if (written > 0)
                line.remove_prefix(static_cast<std::size_t>(written));
        }
    }
    std::string pending_;
};

class Launch {
public:
    explicit Launch(const LaunchOptions& options) : options_(options) {
        std::array<std::byte, 16> random{};
        net::fill_random(random);
        socket_name_ = "bellows-launch-";
        for (const std::byte byte : random)
            socket_name_ += static_cast<char>('a' + std::to_integer<int>(byte) % 26);
        reports_ = net::bind_datagrams(socket_name_);
    }

    LaunchResult run() {
        start();
        const Deadline startup(options_.startup_timeout);
        int status = 0;
        while (::waitpid(mpirun_, &status, WNOHANG) == 0) {
            wait_for_events();
            end_if_due(startup);
        }
        relay_.take(errors_.read.get());
        relay_.finish();
        read_reports();
        kill_leftovers();
        return judge(status);
    }

private:
    void start();
    [[noreturn]] void become_mpirun(char* const* arguments, char* const* environment, int failure);
    std::vector<std::string> environment() const;

    void wait_for_events() {
        std::vector<pollfd> entries{{reports_.get(), POLLIN, 0},
                                    {errors_.read.get(), POLLIN, 0},
                                    {signals_.fd(), POLLIN, 0}};
        // At once: where one dies, mpirun may end the others, and the first is to be named.
        for (const auto& [rank, process] : processes_)
            if (process.handle && !exit_codes_.contains(rank) && !silent_.contains(rank))
                entries.push_back({process.handle.get(), POLLIN, 0});
        ::poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
        if (entries[1].revents & POLLHUP) // mpirun is about to end
            std::this_thread::sleep_for(Milliseconds{5});
        relay_.take(errors_.read.get());
        const std::vector<int> ended = ended_processes(); // before their last reports are read
        read_reports();
        for (const int rank : ended)
            if (!exit_codes_.contains(rank))
                take_silence(rank);
        if (const int number = signals_.take())
            take_signal(number);
    }

    /// The first one asks ranks that can still save their work; a later one ends them.
    void take_signal(int number) {
        if (asked_ && !asked_->expired())
            return; // some programs send to a process and to its group
        const bool all_started = started_.size() == static_cast<std::size_t>(options_.ranks);
        const bool may_ask = options_.stop_signal != 0 && !asked_ && all_started && !end_by_;
        if (may_ask) {
            asked_.emplace(kOneSignal);
            signal_ranks(options_.stop_signal);
            return;
        }
        signal_ = number;
        end_ranks();
    }

    void read_reports() {
        struct {
            LaunchReport head;
            std::array<char, kMaxReason> reason;
        } message;
        for (;;) {
            pid_t sender = 0;
            const std::int64_t size = net::receive_datagram(
                reports_.get(), std::as_writable_bytes(std::span(&message, 1)), sender);
            if (size < 0)
                return;
            if (size >= static_cast<std::int64_t>(sizeof message.head))
                take_report(
                    message.head, sender,
                    {message.reason.data(), static_cast<std::size_t>(size) - sizeof message.head});
        }
    }

    void take_report(const LaunchReport& report, pid_t sender, std::string_view reason) {
        if (report.rank < 0 || report.rank >= options_.ranks)
            return;
        const auto [rank, first] = processes_.try_emplace(report.rank);
        if (first)
            rank->second = {
                FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, sender, 0))), sender, {}};
        if (report.exit_code == kAlive)
            return;
        started_.insert(report.rank);
        if (report.exit_code == kStarted)
            return;
        exit_codes_[report.rank] = report.exit_code;
        if (report.exit_code != 0 && report.exit_code == options_.stopped_exit_code)
            stopped_ = true;
        else if (report.exit_code != 0 && !first_failure_)
            first_failure_ = LaunchResult{report.exit_code, report.rank, std::string(reason)};
        const bool all_ended = exit_codes_.size() == static_cast<std::size_t>(options_.ranks);
        if ((first_failure_ || all_ended) && !end_by_)
            end_by_.emplace(options_.grace);
    }

    std::vector<int> ended_processes() const {
        std::vector<int> ranks;
        for (const auto& [rank, process] : processes_) {
            pollfd entry{process.handle.get(), POLLIN, 0};
            if (process.handle && !exit_codes_.contains(rank) && ::poll(&entry, 1, 0) == 1)
                ranks.push_back(rank);
        }
        return ranks;
    }

    /// A process has ended without a report. The others may know more; they have the grace to tell.
    void take_silence(int rank) {
        silent_.insert(rank);
        if (first_silent_ < 0)
            first_silent_ = rank;
        if (!end_by_)
            end_by_.emplace(options_.grace);
    }

    /// Ranks that do not move although they live. One that has reported its end may, too.
    void watch_stopped() {
        for (auto& [rank, process] : processes_) {
            if (!process.handle || !is_stopped(process.id)) {
                process.stopped.reset();
            } else if (!process.stopped) {
                process.stopped.emplace(options_.stopped_timeout);
            } else if (process.stopped->expired() && !end_by_) {
                first_failure_ = LaunchResult{
                    kPeerLostExit, rank,
                    "rank " + std::to_string(rank) + " (pid " + std::to_string(process.id) +
                        ") is stopped and was given up after " +
                        std::to_string(options_.stopped_timeout.count()) + " ms"};
                end_by_.emplace(Milliseconds{0});
            }
        }
    }

    /// By a signal, not by a debugger.
    static bool is_stopped(pid_t process) {
        std::ifstream file("/proc/" + std::to_string(process) + "/stat");
        std::string text;
        std::getline(file, text);
        const std::size_t name_end = text.rfind(") ");
        return name_end != std::string::npos && text[name_end + 2] == 'T';
    }

    void end_if_due(const Deadline& startup) {
        if (looked_.expired()) {
            watch_stopped();
            looked_ = Deadline(kLookAtRanks);
        }
        const bool all_started = started_.size() == static_cast<std::size_t>(options_.ranks);
        if (!all_started && startup.expired() && !first_failure_) {
            first_failure_ =
                LaunchResult{kPeerLostExit, -1,
                             missing(started_) + " did not start within " +
                                 std::to_string(options_.startup_timeout.count()) + " ms"};
            end_ranks();
        }
        if (end_by_ && end_by_->expired())
            end_ranks();
        if (kill_by_ && kill_by_->expired())
            ::kill(mpirun_, SIGKILL);
    }

    void end_ranks() {
        if (kill_by_)
            return;
        killed_ = true;
        kill_by_.emplace(kKillAfterTerm);
        ::kill(mpirun_, SIGTERM);
    }

    // OpenMPI 5 ends without the ranks that are stopped.
    void kill_leftovers() { signal_ranks(SIGKILL); }

    void signal_ranks(int number) {
        for (const auto& [rank, process] : processes_)
            if (process.handle)
                ::syscall(SYS_pidfd_send_signal, process.handle.get(), number, nullptr, 0);
    }

    std::string missing(const auto& present) const {
        std::string text = "rank";
        for (int rank = 0; rank < options_.ranks; ++rank)
            if (!present.contains(rank))
                text += " " + std::to_string(rank);
        return text;
    }

    LaunchResult judge(int status) const {
        LaunchResult result;
        const bool all_ended = exit_codes_.size() == static_cast<std::size_t>(options_.ranks);
        if (signal_ != 0)
            result = {128 + signal_, -1, std::string("ended by ") + ::strsignal(signal_)};
        else if (first_failure_)
            result = *first_failure_;
        else if (!silent_.empty())
            result = {kPeerLostExit, first_silent_,
                      started_.contains(first_silent_)
                          ? "rank " + std::to_string(first_silent_) + " ended without saying why"
                          : silent_ranks() + " ended while MPI was starting"};
        else if (started_.empty())
            throw Error(ErrorCode::Mpi,
                        options_.mpirun + " ended with status " +
                            std::to_string(exit_status(status)) +
                            " before any rank had started; its own message says why",
                        -1, exit_status(status));
        else if (!all_ended)
            result = {kPeerLostExit, -1, missing(exit_codes_) + " ended without saying why"};
        else if (stopped_)
            result.exit_code = options_.stopped_exit_code;
        result.killed = killed_;
        return result;
    }

    /// mpirun may end the others before the first is noticed: nobody is to blame for certain.
    std::string silent_ranks() const {
        if (silent_.size() == 1)
            return "rank " + std::to_string(first_silent_);
        std::string text = "one of the ranks";
        for (const int rank : silent_)
            text += " " + std::to_string(rank);
        return text + ", most likely " + std::to_string(first_silent_) + ",";
    }

    static int exit_status(int status) {
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }

    LaunchOptions options_;
    std::string socket_name_;
    FileDescriptor reports_;
    SignalWatch signals_;
    Pipe errors_;
    StderrRelay relay_;
    pid_t mpirun_ = -1;
    struct Process {
        FileDescriptor handle;
        pid_t id = 0;
        std::optional<Deadline> stopped; // when it counts as lost
    };
    std::map<int, Process> processes_; // of ranks that have reported anything
    std::set<int> started_;            // have their World, or have ended
    std::map<int, int> exit_codes_;
    std::set<int> silent_; // ended without a report
    int first_silent_ = -1;
    std::optional<LaunchResult> first_failure_;
    std::optional<Deadline> end_by_, kill_by_;
    Deadline looked_{kLookAtRanks}; // until ranks are looked at again
    int signal_ = 0;                // that ended the ranks
    std::optional<Deadline> asked_; // the ranks have got the stop signal; until here it is one
    bool stopped_ = false;          // a rank has ended because of that
    bool killed_ = false;
};

std::vector<std::string> Launch::environment() const {
    std::vector<std::string> result;
    for (char** entry = environ; *entry; ++entry)
        if (!std::string_view(*entry).starts_with(std::string(kLaunchSocket) + "="))
            result.emplace_back(*entry);
    for (const auto& [name, value] : mpirun_environment())
        if (!std::getenv(name.c_str()))
            result.push_back(name + "=" + value);
    result.push_back(std::string(kLaunchSocket) + "=" + socket_name_);
    return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts)
        result.push_back(text.data());
    result.push_back(nullptr);
    return result;
}

void Launch::start() {
    std::vector<std::string> words{options_.mpirun};
    for (const std::string& word : mpirun_arguments(options_.ranks))
        words.push_back(word);
    words.insert(words.end(), options_.command.begin(), options_.command.end());
    std::vector<std::string> variables = environment();
    const std::vector<char*> arguments = pointers(words), values = pointers(variables);

    Pipe failure; // closed by a successful exec, else it brings errno
    mpirun_ = ::fork();
    if (mpirun_ < 0)
        throw net::errno_error("cannot start a process", errno);
    if (mpirun_ == 0)
        become_mpirun(arguments.data(), values.data(), failure.write.get());
    failure.write.reset();
    errors_.write.reset();
    int error_number = 0;
    if (::read(failure.read.get(), &error_number, sizeof error_number) == sizeof error_number) {
        ::waitpid(mpirun_, nullptr, 0);
        throw Error(
            ErrorCode::InvalidArgument,
            "cannot start " + options_.mpirun + ": " + std::strerror(error_number) +
                "; several ranks need OpenMPI (package openmpi-bin): install it, or use --ranks 1",
            -1, error_number);
    }
    ::fcntl(errors_.read.get(), F_SETFL, O_NONBLOCK);
}

// In the child, where only calls that are safe after fork are allowed.
void Launch::become_mpirun(char* const* arguments, char* const* environment, int failure) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM); // no ranks without their launcher
    ::setpgid(0, 0);                    // what a terminal sends is for the launcher
    if (const int empty = ::open("/dev/null", O_RDONLY); empty >= 0)
        ::dup2(empty, STDIN_FILENO); // nobody may read the terminal behind the launcher's back
    ::dup2(errors_.write.get(), STDERR_FILENO);
    ::pthread_sigmask(SIG_SETMASK, &signals_.mask_before(), nullptr);
    ::execvpe(arguments[0], arguments, environment);
    const int error_number = errno;
    [[maybe_unused]] const ssize_t written = ::write(failure, &error_number, sizeof error_number);
    ::_exit(127);
}

} // namespace

LaunchResult launch_ranks(const LaunchOptions& options) {
    if (options.ranks < 1 || options.command.empty())
        throw Error(ErrorCode::InvalidArgument,
                    "nothing to launch: " + std::to_string(options.ranks) + " ranks of " +
                        (options.command.empty() ? "no command" : options.command.front()));
    return Launch(options).run();
}

} // namespace bellows
