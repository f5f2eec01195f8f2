// SPDX-License-Identifier: MIT
#include <bellows/run/world.hpp>

#include <bellows/base/error.hpp>
#include <bellows/comm/launch.hpp>

namespace bellows {

namespace {

World make_world() {
    if (!is_launched())
        return World::single();
    int argc = 0;
    char** argv = nullptr;
    return World::init(argc, argv);
}

} // namespace

int in_world(const std::function<int(World&)>& body) {
    World world = make_world();
    int code = 0;
    try {
        code = body(world);
    } catch (const Error& error) {
        if (world.size() == 1)
            throw;
        world.control().abort(error);
        if (const auto cause = world.control().failure())
            throw Error(*cause); // what really happened, on every rank
        throw;
    } catch (const std::exception& error) {
        world.control().abort(Error(ErrorCode::Internal, error.what(), world.rank()));
        throw;
    }
    world.close();
    return code;
}

} // namespace bellows
