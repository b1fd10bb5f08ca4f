//! Those that have no key, or send what they should not: they are counted and hung up on, and others are served.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvx_connector::control::{Control, Key, Security};
use kvx_core::card::Address;
use kvx_core::{ErrorKind, Retry};

use crate::kit::{SOON, Side, config, key, memory, start, until};

/// A stranger that sends this. What he hears until he is hung up on.
fn stranger(address: &Address, sends: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address.to_string()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // He may be hung up on before he has finished.
    let _ = stream.write_all(sends);
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return heard,
            Ok(bytes) => heard.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return heard,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn who_has_another_key_hears_nothing_and_knows_what_to_do() {
    let mut prefill = start("prefill", key());
    let address = prefill.listen("127.0.0.1:0");
    let mut wrong = start("decode", Security::with_key(Key::from_bytes([8; 32])));
    let session = wrong.control.dial(&address, None).unwrap();
    let why = wrong.down(session);
    assert_eq!((why.kind(), why.retry()), (ErrorKind::Peer, Retry::Backoff));
    let text = why.to_string();
    assert!(text.contains("same key") && text.contains(&address.to_string()), "{text}");
    until(&prefill.control, "counted", |it| it.stats().wrong_key == 1);
    prefill.joined(&mut start("decode", key()));
    // Nor does one without a key get any further.
    let plain = Security::plaintext_on_loopback();
    let mut without = config("decode", plain);
    without.allowed = Some([crate::kit::host("127.0.0.1:1")].into());
    let mut without = Side::new(without);
    let session = without.control.dial(&address, None).unwrap();
    without.down(session);
    until(&prefill.control, "counted", |it| it.stats().not_ours == 1);
    assert_eq!(prefill.control.stats().established, 1);
}

/// Known failures 57 and 115 (sglang PR#30352, vllm PR#17192): nothing that is sent ends the listener.
#[test]
fn bad_frames_of_every_kind_end_their_own_session_only() {
    let preamble = |keyed: u8| [b"KVX ctrl\x01".as_slice(), &[keyed, 0, 0]].concat();
    let noise = |bytes: u8| [&[bytes, 0], vec![9; bytes.into()].as_slice()].concat();
    let mut keyed = start("prefill", key());
    let address = keyed.listen("127.0.0.1:0");
    let mut friend = start("decode", key());
    let (there, here) = keyed.joined(&mut friend);
    let cases: [(&[u8], &str); 9] = [
        (b"GET / HTTP/1.1\r\nHost: prefill\r\n\r\n", "not_ours"),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", "not_ours"),
        (b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix", "not_ours"),
        (&[0; 100_000], "not_ours"),
        (&preamble(0), "not_ours"),
        (&[preamble(1), noise(47)].concat(), "wrong_key"),
        (&[preamble(1), noise(48)].concat(), "wrong_key"),
        (&[preamble(1), vec![0xff; 70_000]].concat(), "wrong_key"),
        (&[preamble(1), vec![0, 0]].concat(), "wrong_key"),
    ];
    let count = |control: &Control| (control.stats().not_ours, control.stats().wrong_key);
    for (sends, counter) in cases {
        let (not_ours, wrong_key) = count(&keyed.control);
        assert!(stranger(&address, sends).is_empty());
        let now = count(&keyed.control);
        match counter {
            "not_ours" => assert_eq!(now, (not_ours + 1, wrong_key)),
            _ => assert_eq!(now, (not_ours, wrong_key + 1)),
        }
        keyed.ask(there, &mut friend, here);
    }
    assert_eq!(keyed.control.stats().up, 1);

    // Without a key one gets as far as the hello, and beyond.
    let mut plain = start("prefill", Security::plaintext_on_loopback());
    let address = plain.listen("127.0.0.1:0");
    let mut friend = config("friend", Security::plaintext_on_loopback());
    friend.allowed = Some([crate::kit::host("127.0.0.1:1")].into());
    let mut friend = Side::new(friend);
    friend.control.dial(&address, None).unwrap();
    let ((there, _), (here, _)) = (plain.up(), friend.up());
    let hello = b"\x01\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x83\xa6engine\xa1x\
        \xabincarnation\xdc\x00\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xa4rank\xc0\x01";
    let hello = [&[u8::try_from(hello.len()).unwrap(), 0], hello.as_slice()].concat();
    for (number, sends) in [
        [preamble(0), vec![1, 0, 77]].concat(),
        [preamble(0), vec![0xff, 0xff]].concat(),
        [preamble(0), vec![5, 0, 1, 2, 3, 4, 1]].concat(),
        [preamble(0), hello.clone(), vec![6, 0, b'A', b'B', b'O', b'R', b'T', 77]].concat(),
        [preamble(0), hello.clone(), hello.clone()].concat(),
        [preamble(0), hello.clone(), vec![3, 0, b'x', b'y', 2]].concat(),
    ]
    .into_iter()
    .enumerate()
    {
        let heard = stranger(&address, &sends);
        assert!(
            heard.windows(4).any(|it| it == b"code"),
            "he is told why: {}",
            heard.escape_ascii()
        );
        until(&plain.control, "counted", |it| {
            let stats = it.stats();
            stats.bad_frames + stats.refused == number as u64 + 1
        });
        plain.ask(there, &mut friend, here);
    }
    assert_eq!(plain.control.stats().up, 1);
}

/// Known failure 116 (vllm PR#51504, PR#45230): connections that say nothing, a ceiling of them, and others are served.
#[test]
fn half_open_connections_have_a_ceiling() {
    let count = if std::env::var("KVX_LONG").is_ok_and(|it| it == "1") { 10_000 } else { 2_000 };
    let mut prefill = config("prefill", key());
    prefill.limits.half_open_for = Duration::from_secs(60);
    prefill.limits.half_open = 256;
    let ceiling = prefill.limits.half_open;
    let mut prefill = Side::new(prefill);
    let address = prefill.listen("127.0.0.1:0");
    let mut friend = start("decode", key());
    let (there, here) = prefill.joined(&mut friend);
    let (before, begun) = (memory(), Instant::now());
    let mut slowest = Duration::ZERO;
    let mut newcomers = 0;
    let mut silent = Vec::with_capacity(count);
    for number in 0..count {
        let mut stream = TcpStream::connect(address.to_string()).unwrap();
        match number % 3 {
            0 => {}
            1 => stream.write_all(b"KVX ctrl\x01").unwrap(),
            _ => drop(stream.write_all(b"KVX ctrl\x01\x01\0\0\x30\0half of a message")),
        }
        silent.push(stream);
        if number % 100 == 0 {
            slowest = slowest.max(prefill.ask(there, &mut friend, here));
            let newcomer = friend.control.dial(&address, None).unwrap();
            let ((up, _), (accepted, _)) = (friend.up(), prefill.up());
            assert_eq!(up, newcomer);
            newcomers += 1;
            friend.control.close(newcomer);
            friend.down(newcomer);
            prefill.down(accepted);
        }
        assert!(prefill.control.stats().half_open <= ceiling as u64);
    }
    let held = count - ceiling;
    until(&prefill.control, "evicted", |it| it.stats().evicted >= held as u64);
    let (grown, stats) = (memory().saturating_sub(before), prefill.control.stats());
    println!(
        "{count} half-open connections in {:?}: {grown} KiB more, {} held, {} evicted, {newcomers} newcomers served, \
         slowest round trip {slowest:?}",
        begun.elapsed(),
        stats.half_open,
        stats.evicted
    );
    // The strangers' own ends are in this process, too: four bytes each.
    assert!(grown < 8 << 10, "{grown} KiB");
    assert_eq!(stats.half_open, ceiling as u64);
    assert_eq!((stats.up, stats.wrong_key), (1, 0));
    // It is the newest that are left: the first ones have been hung up on.
    silent[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(silent[0].read(&mut [0; 8]).unwrap_or(0), 0);
}

#[test]
fn half_open_connections_and_dials_have_a_deadline() {
    let mut short = config("prefill", key());
    short.limits.half_open_for = Duration::from_millis(200);
    let mut prefill = Side::new(short.clone());
    let address = prefill.listen("127.0.0.1:0");
    let begun = Instant::now();
    assert!(stranger(&address, b"KVX ctrl").is_empty());
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert_eq!(prefill.control.stats().timed_out, 1);
    // One that accepts and says nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let session =
        prefill.control.dial(&mute.local_addr().unwrap().to_string().parse().unwrap(), None);
    let why = prefill.down(session.unwrap());
    assert!(why.to_string().contains("in time"), "{why}");
    assert_eq!(why.retry(), Retry::Backoff);
}

#[test]
fn handshakes_a_second_have_a_limit_and_all_come_in_the_end() {
    let mut prefill = config("prefill", key());
    prefill.limits.handshakes_per_second = 40;
    let mut prefill = Side::new(prefill);
    let address = prefill.listen("127.0.0.1:0");
    let mut decode = start("decode", key());
    let begun = Instant::now();
    for _ in 0..40 {
        decode.control.dial(&address, None).unwrap();
    }
    for _ in 0..40 {
        prefill.up();
        decode.up();
    }
    // A tenth of a second's worth at once, the others one by one.
    assert!(begun.elapsed() >= Duration::from_millis(800), "{:?}", begun.elapsed());
    assert!(prefill.control.stats().deferred > 0);
}
