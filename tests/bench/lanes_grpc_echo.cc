// SPDX-License-Identifier: Apache-2.0
// Unary echo over gRPC C++'s callback API: a client process, steered through standard input and output by bench_lanes, and a
// server process. Built only for comparison (tests/bench/run --rivals); no part of the product.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lanes_grpc.grpc.pb.h"

namespace {

double now_us()
{
    auto t = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(t).count();
}

class EchoService final : public bench::Echo::CallbackService {
    grpc::ServerUnaryReactor *Forward(grpc::CallbackServerContext *context, const bench::Batch *request, bench::Batch *reply) override
    {
        reply->set_slots(request->slots());
        reply->set_tensors(request->tensors());  // one write of each byte, as in our echo
        grpc::ServerUnaryReactor *reactor = context->DefaultReactor();
        reactor->Finish(grpc::Status::OK);
        return reactor;
    }
};

void serve(int port_fd)
{
    EchoService service;
    grpc::ServerBuilder builder;
    int port = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    builder.SetMaxSendMessageSize(-1);
    builder.RegisterService(&service);
    std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    if (!server || write(port_fd, &port, sizeof(port)) != sizeof(port)) {
        _exit(1);
    }
    server->Wait();
}

// Calls in flight of one run.
struct Run {
    bench::Echo::Stub *stub;
    const std::string *tensors;
    std::mutex lock;
    std::condition_variable done;
    int started = 0, finished = 0, count = 0;
    std::vector<double> us;
};

struct Call {
    Run *run;
    std::unique_ptr<grpc::ClientContext> context;
    bench::Batch request, reply;
    double begin_us;

    void begin()
    {
        begin_us = now_us();
        context = std::make_unique<grpc::ClientContext>();
        context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
        request.set_model("bench");
        request.set_slots(1);
        request.set_tensors(*run->tensors);
        run->stub->async()->Forward(context.get(), &request, &reply, [this](grpc::Status status) { end(status); });
    }

    void end(const grpc::Status &status)
    {
        if (!status.ok() || reply.tensors().size() != run->tensors->size()) {
            fprintf(stderr, "lanes_grpc_echo: %s\n", status.error_message().c_str());
            _exit(1);
        }
        bool more;
        {
            std::lock_guard<std::mutex> guard(run->lock);
            run->us.push_back(now_us() - begin_us);
            run->finished++;
            more = run->started < run->count;
            run->started += more;
            if (run->finished == run->count) {
                run->done.notify_all();
            }
        }
        if (more) {
            begin();
        }
    }
};

void measure(bench::Echo::Stub *stub, size_t bytes, int count, int depth)
{
    std::string tensors(bytes, 1);
    Run run;
    std::vector<Call> calls(depth < count ? depth : count);
    run.stub = stub;
    run.tensors = &tensors;
    run.count = count;
    run.started = static_cast<int>(calls.size());
    double begin = now_us();
    for (Call &call : calls) {
        call.run = &run;
        call.begin();
    }
    {
        std::unique_lock<std::mutex> guard(run.lock);
        run.done.wait(guard, [&run] { return run.finished == run.count; });
    }
    printf("%.9f\n", (now_us() - begin) / 1e6);
    for (double us : run.us) {
        printf("%.3f\n", us);
    }
    fflush(stdout);
}

}  // namespace

int main()
{
    int fds[2], port = 0, count, depth;
    size_t bytes;
    if (pipe(fds) != 0) {
        return 1;
    }
    pid_t server = fork();
    if (server == 0) {
        serve(fds[1]);
        return 0;
    }
    if (read(fds[0], &port, sizeof(port)) != sizeof(port)) {
        return 1;
    }
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    auto channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), arguments);
    auto stub = bench::Echo::NewStub(channel);
    printf("%d\n", static_cast<int>(server));
    fflush(stdout);
    while (scanf("%zu %d %d", &bytes, &count, &depth) == 3) {
        measure(stub.get(), bytes, count, depth);
    }
    kill(server, SIGKILL);
    return 0;
}
