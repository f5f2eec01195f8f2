// SPDX-License-Identifier: MIT
#include "mpi_context.hpp"

#include <array>

namespace bellows {

void check_mpi(int result, const char* call) {
    if (result == MPI_SUCCESS)
        return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(result, text.data(), &length);
    throw Error(ErrorCode::Mpi,
                std::string(call) +
                    " failed: " + std::string(text.data(), static_cast<std::size_t>(length)),
                -1, result);
}

MpiContext::MpiContext(MPI_Comm original, Milliseconds setup_timeout) : timeout_(setup_timeout) {
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_SERIALIZED)
        throw Error(ErrorCode::Unsupported,
                    "MPI was started with thread level " + std::to_string(level) +
                        "; start it with MPI_Init_thread and MPI_THREAD_MULTIPLE (" +
                        std::to_string(MPI_THREAD_MULTIPLE) + ") or MPI_THREAD_SERIALIZED (" +
                        std::to_string(MPI_THREAD_SERIALIZED) + ")",
                    -1, level);
    needs_lock_ = level < MPI_THREAD_MULTIPLE;
    communicator_ = duplicate(original, setup_timeout, nullptr);
    check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
}

void MpiContext::wait(MPI_Request& request, const char* what, Milliseconds timeout,
                      const ControlPlane* control) const {
    const Deadline deadline(timeout);
    Backoff backoff;
    for (;;) {
        int done = 0;
        {
            const auto guard = lock();
            check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
        }
        if (done)
            return;
        if (control)
            control->throw_if_failed();
        if (deadline.expired())
            throw Error(ErrorCode::Timeout,
                        "rank " + std::to_string(rank_) + " waited " +
                            std::to_string(timeout.count()) + " ms in " + what +
                            " at set-up; is every rank running and calling it?");
        backoff.pause();
    }
}

MPI_Comm MpiContext::duplicate(MPI_Comm original, Milliseconds timeout,
                               const ControlPlane* control) const {
    MPI_Comm copy = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
    {
        const auto guard = lock();
        check_mpi(MPI_Comm_idup(original, &copy, &request), "MPI_Comm_idup");
    }
    wait(request, "MPI_Comm_idup", timeout, control);
    const auto guard = lock();
    check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return copy;
}

std::vector<std::string> MpiContext::all_gather(const std::string& bytes) const {
    const auto count = static_cast<std::size_t>(size_);
    std::vector<int> lengths(count), offsets(count);
    const int length = static_cast<int>(bytes.size());
    MPI_Request request = MPI_REQUEST_NULL;
    {
        const auto guard = lock();
        check_mpi(MPI_Iallgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, communicator_,
                                 &request),
                  "MPI_Iallgather");
    }
    wait(request, "MPI_Iallgather", timeout_, nullptr);
    int total = 0;
    for (std::size_t r = 0; r < count; ++r) {
        offsets[r] = total;
        total += lengths[r];
    }
    std::string all(static_cast<std::size_t>(total), '\0');
    {
        const auto guard = lock();
        check_mpi(MPI_Iallgatherv(bytes.data(), length, MPI_BYTE, all.data(), lengths.data(),
                                  offsets.data(), MPI_BYTE, communicator_, &request),
                  "MPI_Iallgatherv");
    }
    wait(request, "MPI_Iallgatherv", timeout_, nullptr);
    std::vector<std::string> parts;
    for (std::size_t r = 0; r < count; ++r)
        parts.push_back(
            all.substr(static_cast<std::size_t>(offsets[r]), static_cast<std::size_t>(lengths[r])));
    return parts;
}

std::vector<int> MpiContext::node_leaders() const {
    int leader = 0;
    {
        // The only blocking collective besides MPI_Init: MPI has no other form of it.
        const auto guard = lock();
        MPI_Comm node = MPI_COMM_NULL;
        check_mpi(
            MPI_Comm_split_type(communicator_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
        MPI_Group node_group = MPI_GROUP_NULL, world_group = MPI_GROUP_NULL;
        check_mpi(MPI_Comm_group(node, &node_group), "MPI_Comm_group");
        check_mpi(MPI_Comm_group(communicator_, &world_group), "MPI_Comm_group");
        const int first = 0;
        check_mpi(MPI_Group_translate_ranks(node_group, 1, &first, world_group, &leader),
                  "MPI_Group_translate_ranks");
        MPI_Group_free(&node_group);
        MPI_Group_free(&world_group);
        MPI_Comm_free(&node);
    }
    std::vector<int> leaders;
    for (const std::string& text : all_gather(std::to_string(leader)))
        leaders.push_back(std::stoi(text));
    return leaders;
}

void MpiContext::free() noexcept {
    const auto guard = lock();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && communicator_ != MPI_COMM_NULL)
        MPI_Comm_free(&communicator_);
    communicator_ = MPI_COMM_NULL;
}

} // namespace bellows
