// SPDX-License-Identifier: MIT
#include "mpirun_process.hpp"

#include "socket.hpp"

#include <bellows/base/error.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {
namespace {

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts)
        result.push_back(text.data());
    result.push_back(nullptr);
    return result;
}

// In the child, where only calls that are safe after fork are allowed.
[[noreturn]] void become(char* const* arguments, char* const* environment, const sigset_t& mask,
                         int errors, int failure) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM); // no ranks without their launcher
    ::setpgid(0, 0);                    // what a terminal sends is for the launcher
    if (const int empty = ::open("/dev/null", O_RDONLY); empty >= 0)
        ::dup2(empty, STDIN_FILENO); // nobody may read the terminal behind the launcher's back
    ::dup2(errors, STDERR_FILENO);
    ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
    ::execvpe(arguments[0], arguments, environment);
    const int error_number = errno;
    [[maybe_unused]] const ssize_t written = ::write(failure, &error_number, sizeof error_number);
    ::_exit(127);
}

} // namespace

pid_t start_mpirun(const LaunchOptions& options, std::vector<std::string> environment,
                   const sigset_t& signal_mask, Pipe& errors) {
    std::vector<std::string> words{options.mpirun};
    for (const std::string& word : mpirun_arguments(options.ranks))
        words.push_back(word);
    words.insert(words.end(), options.command.begin(), options.command.end());
    const std::vector<char*> arguments = pointers(words), values = pointers(environment);

    Pipe failure; // closed by a successful exec, else it brings errno
    const pid_t process = ::fork();
    if (process < 0)
        throw net::errno_error("cannot start a process", errno);
    if (process == 0)
        become(arguments.data(), values.data(), signal_mask, errors.write.get(),
               failure.write.get());
    failure.write.reset();
    errors.write.reset();
    int error_number = 0;
    if (::read(failure.read.get(), &error_number, sizeof error_number) == sizeof error_number) {
        ::waitpid(process, nullptr, 0);
        throw Error(
            ErrorCode::InvalidArgument,
            "cannot start " + options.mpirun + ": " + std::strerror(error_number) +
                "; several ranks need OpenMPI (package openmpi-bin): install it, or use --ranks 1",
            -1, error_number);
    }
    ::fcntl(errors.read.get(), F_SETFL, O_NONBLOCK);
    return process;
}

} // namespace bellows
