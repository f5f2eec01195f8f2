// SPDX-License-Identifier: MIT

// Somebody connects to mpirun and says nothing, while its ranks work: this program launches itself,
// and rank 0 is the stranger. And what a launch leaves in shared memory.

#include "comm/world/job_folder.hpp"
#include "comm/world/process_state.hpp"
#include "comm/world/socket.hpp"
#include "launched.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace bellows {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

/// Of the sockets that a process has open.
std::set<std::string> socket_inodes(pid_t process) {
    std::set<std::string> inodes;
    for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(process) + "/fd")) {
        std::error_code gone;
        const std::string target = fs::read_symlink(entry.path(), gone).string();
        if (target.starts_with("socket:["))
            inodes.insert(target.substr(8, target.size() - 9));
    }
    return inodes;
}

/// TCP ports that a process listens at.
std::vector<std::uint16_t> ports_of(pid_t process) {
    const std::set<std::string> inodes = socket_inodes(process);
    std::vector<std::uint16_t> ports;
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        std::ifstream file(table);
        std::string line;
        std::getline(file, line);
        while (std::getline(file, line)) {
            std::istringstream in(line);
            std::string slot, local, remote, state, queues, timer, retransmits, user, timeout,
                inode;
            in >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
                timeout >> inode;
            if (state == "0A" && inodes.contains(inode))
                ports.push_back(static_cast<std::uint16_t>(
                    std::stoul(local.substr(local.rfind(':') + 1), nullptr, 16)));
        }
    }
    return ports;
}

int run_rank(int argc, char** argv) {
    std::string reason;
    int rank = -1;
    std::vector<FileDescriptor> silent;
    try {
        World world = World::init(argc, argv);
        rank = world.rank();
        world.control().barrier(30s);
        if (rank == 0) {
            std::this_thread::sleep_for(500ms); // the launcher has heard of every rank
            for (const std::uint16_t port : ports_of(::getppid()))
                if (FileDescriptor socket = net::connect_tcp("127.0.0.1", port, Deadline(500ms)))
                    silent.push_back(std::move(socket));
            if (!silent.empty())
                reason = std::to_string(silent.size()) + " ports of mpirun take connections";
            if (!ports_of(::getpid()).empty())
                reason = "the rank itself listens at a port";
        }
        world.control().barrier(30s);
        world.close();
    } catch (const Error& error) {
        reason = error.message();
    }
    report_exit(rank, reason.empty() ? 0 : 1, reason);
    return reason.empty() ? 0 : 1;
}

class Strangers : public testing::Launched {};

bool may_take_descriptors() {
    const FileDescriptor self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_getfd, self.get(), 0, 0))).get() >=
           0;
}

TEST_F(Strangers, CannotConnectOnceTheRanksHaveStarted) {
    if (!may_take_descriptors())
        GTEST_SKIP() << "the system does not allow pidfd_getfd";
    const LaunchResult result = launch(2, "work", "none");
    EXPECT_EQ(result.exit_code, 0) << result.reason;
    EXPECT_LT(took_, 20s);
}

TEST(JobFolder, GoesWithItsLauncher) {
    std::string path;
    {
        const JobFolder folder;
        path = folder.path();
        ASSERT_TRUE(fs::is_directory(path)) << path;
        EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_all);
        std::ofstream(path + "/segment") << "memory";
        const JobFolder other;
        EXPECT_NE(other.path(), path);
        EXPECT_TRUE(fs::exists(path + "/segment")) << "its owner lives";
    }
    EXPECT_FALSE(fs::exists(path));
}

TEST(JobFolder, OfAKilledLauncherGoesWithTheNext) {
    if (::access("/dev/shm", W_OK) != 0)
        GTEST_SKIP() << "there is no /dev/shm";
    std::string abandoned = "/dev/shm/bellows-job-XXXXXX";
    ASSERT_NE(::mkdtemp(abandoned.data()), nullptr);
    fs::create_directory(abandoned + "/session");
    const fs::path kept =
        fs::temp_directory_path() / ("bellows-kept-" + std::to_string(::getpid()));
    fs::create_directory(kept);
    std::ofstream(kept / "file") << "not ours";
    fs::create_directory_symlink(kept, abandoned + "/link");
    const JobFolder folder;
    EXPECT_FALSE(fs::exists(abandoned));
    EXPECT_TRUE(fs::exists(kept / "file")) << "a link was followed";
    fs::remove_all(kept);
}

} // namespace
} // namespace bellows

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "--rank")
        return bellows::run_rank(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
