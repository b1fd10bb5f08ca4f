//! What is said to carry the data does: bytes that go over the loopback are counted, in a network namespace where nobody else is.

use std::process::Command;

use kvx_core::ErrorKind;
use kvx_core::backend::TransferBackend as _;
use kvx_core::id::TransferId;
use kvx_core::memory::Region;
use kvx_core::transfer::{Mode, PostedSegment};

use crate::network::{Family, Namespace};
use crate::pair::{CMA_1_13, Pair, alone_by, block, is_1_13, open_with, skip};

const SIZE: u64 = 8 << 20;
const DEVICE: &str = "KVX_UCX_DEVICE";

pub(crate) fn what_is_said_to_carry_the_data_does() {
    in_namespace("what_is_said_to_carry_the_data_does", |device| {
        let mut seen = Vec::new();
        for options in [
            "tls=tcp",
            "tls=tcp+sm",
            "tls=tcp+sm,ucx.PROTO_ENABLE=n",
            "tls=tcp+sm,ucx.PROTO_ENABLE=y",
            "tls=sm+self,ucx.MM_ERROR_HANDLING=y",
        ] {
            let options = format!("{options},devices={device}");
            let open = || open_with(&options).unwrap();
            let pair = Pair::meet(&open(), &open());
            block(pair.one.connect(pair.at_one)).unwrap();
            let transport = pair.one.peer_info(pair.at_one).unwrap().transport;
            let carrier = transport.split('+').next().unwrap();
            let [mine, theirs] = [0, 1].map(|_| Region::host(SIZE).unwrap());
            let (local, remote) = pair.lane(&mine, &theirs);
            for (id, mode) in [(1, Mode::Read), (2, Mode::Write)] {
                let segment = |offset| PostedSegment {
                    local,
                    remote,
                    local_offset: offset,
                    remote_offset: offset,
                    bytes: SIZE / 64,
                };
                let segments: Vec<_> = (0..64).map(|at| segment(at * (SIZE / 64))).collect();
                let before = loopback_bytes();
                pair.transfer(TransferId(id), mode, &segments);
                let moved = loopback_bytes() - before;
                let holds = if carrier == "tcp" { moved >= SIZE } else { moved < SIZE / 8 };
                assert!(
                    holds,
                    "{options}: {transport}, and {mode:?} of {SIZE} bytes moved {moved} over TCP"
                );
            }
            eprintln!("{options}: {transport}");
            seen.push(carrier.to_owned());
        }
        let both = if is_1_13() { "tcp" } else { "cma" };
        assert_eq!((seen[0].as_str(), seen[1].as_str()), ("tcp", both));
    });
}

/// UCX 1.13 names CMA among its ways, and reads and writes by others.
pub(crate) fn cma_that_carries_nothing_is_refused() {
    in_namespace("cma_that_carries_nothing_is_refused", |device| {
        let options = format!("tls=tcp+sm,devices={device}");
        let one = open_with(&format!("{options},require=cma")).unwrap();
        let pair = Pair::meet(&one, &open_with(&options).unwrap());
        let connected = block(pair.one.connect(pair.at_one));
        if !is_1_13() {
            return connected.unwrap();
        }
        let error = connected.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = error.to_string();
        assert!(text.contains("require=cma") && text.contains("chosen=tcp"), "{text}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("1.20")), "{text}");
    });
}

/// Runs a test in a namespace, with the name of an interface there, and with CMA for all that UCX 1.13 has it do.
fn in_namespace(test: &str, act: impl FnOnce(&str)) {
    if let Ok(device) = std::env::var(DEVICE) {
        return alone_by(Command::new("true"), test, &[], || act(&device));
    }
    let namespace = match Namespace::new(Family::Four, 1) {
        Ok(namespace) => namespace,
        Err(reason) => return skip(format!("network namespaces cannot be had: {reason}")),
    };
    let mut program = Command::new("ip");
    program.args(["netns", "exec", &namespace.name]).arg(std::env::current_exe().unwrap());
    alone_by(program, test, &[CMA_1_13, (DEVICE, &namespace.links[0].inside)], || ());
}

/// What a namespace's processes send to each other.
fn loopback_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("lo:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
