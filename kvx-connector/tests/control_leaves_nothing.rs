//! What is left of a control channel: nothing. Alone in its process, so that nobody else's threads and descriptors count.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_connector::control::{Control, ControlConfig, ControlEvent, Key, RemoteIdentity, Security};
use kvx_core::card::EngineName;
use kvx_core::id::Incarnation;

#[cfg(test)]
fn start(engine: &str) -> Control {
    let identity = RemoteIdentity {
        engine: EngineName::new(engine).unwrap(),
        incarnation: Incarnation::random().unwrap(),
        rank: None,
    };
    let security = Security::with_key(Key::from_bytes([1; 32]));
    Control::start(ControlConfig::new(identity, security)).unwrap()
}

/// Two channels with sessions, messages on their way, a dial that nobody answers and connections that say nothing.
#[cfg(test)]
fn life() {
    let (prefill, decode) = (start("prefill"), start("decode"));
    let address = prefill.listen(&"localhost:0".parse().unwrap()).unwrap();
    let silent: Vec<_> =
        (0..10).map(|_| std::net::TcpStream::connect(address.to_string()).unwrap()).collect();
    for _ in 0..20 {
        let session = decode.dial(&address, None).unwrap();
        let _ = decode.send(session, &vec![0; 300_000]).unwrap();
    }
    decode.dial(&"192.0.2.1:9".parse().unwrap(), None).unwrap();
    let (mut ups, mut events) = (0, Vec::new());
    while ups < 10 {
        decode.wait(Duration::from_secs(30)).unwrap();
        decode.poll(&mut events);
        ups += events.drain(..).filter(|it| matches!(it, ControlEvent::Up { .. })).count();
    }
    drop(decode);
    drop(silent);
    prefill.shutdown();
}

#[cfg(target_os = "linux")]
#[test]
fn no_thread_descriptor_or_memory_is_left() {
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let memory = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let fields = status.lines().filter_map(|line| line.split_once(':'));
        let fields: BTreeMap<_, _> = fields.collect();
        fields["VmRSS"].trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // The first lives warm the allocator.
    for _ in 0..10 {
        life();
    }
    let before = (count("task"), count("fd"));
    let memory_before = memory();
    for _ in 0..40 {
        life();
    }
    assert_eq!((count("task"), count("fd")), before);
    let grown = memory().saturating_sub(memory_before);
    println!("{grown} KiB after 40 lives");
    assert!(grown < 4 << 10, "{grown} KiB");
}
