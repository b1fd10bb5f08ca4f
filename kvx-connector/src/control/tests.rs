//! What wants names that no resolver knows.

use std::net::SocketAddr;

use kvx_core::id::Incarnation;

use super::*;

fn start(resolver: &Resolver, security: Security) -> Control {
    let identity = RemoteIdentity {
        engine: EngineName::new("engine").unwrap(),
        incarnation: Incarnation::random().unwrap(),
        rank: None,
    };
    let mut config = ControlConfig::new(identity, security);
    config.allowed = Some(
        ["six.example:1", "lies.example:1", "nobody.example:1", "slow.example:1"]
            .map(|it| Allowed::Host(it.parse::<Address>().unwrap().host().clone()))
            .into(),
    );
    config.limits.half_open_for = Duration::from_secs(20);
    Control::start_with(config, resolver.clone()).unwrap()
}

fn resolver() -> Resolver {
    Resolver::new(|name, port| {
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), port);
        match name {
            "six.example" => Ok(vec![at("::1")]),
            "lies.example" => Ok(vec![at("127.0.0.1"), at("192.0.2.1")]),
            "slow.example" => {
                std::thread::sleep(Duration::from_millis(1500));
                Ok(vec![at("::1")])
            }
            _ => Err(std::io::Error::other("no such host")),
        }
    })
}

fn next(control: &Control) -> ControlEvent {
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(control.wait(Duration::from_secs(30)).unwrap());
        control.poll(&mut events);
    }
    assert_eq!(events.len(), 1);
    events.remove(0)
}

fn key() -> Security {
    Security::with_key(Key::from_bytes([1; 32]))
}

/// Known failure 117 (dynamo PR#3019): a host that has IPv6 addresses only, by its name.
#[test]
fn a_name_of_ipv6_addresses_only_is_listened_at_and_dialled() {
    let (one, other) = (start(&resolver(), key()), start(&resolver(), key()));
    let address = one.listen(&"six.example:0".parse().unwrap()).unwrap();
    assert_eq!(address.to_string(), format!("six.example:{}", address.port()));
    let session = other.dial(&address, None).unwrap();
    assert!(matches!(next(&other), ControlEvent::Up { session: up, .. } if up == session));
    assert!(other.sessions()[0].peer.is_ipv6());
}

#[test]
fn a_name_that_is_not_known_is_named() {
    let one = start(&resolver(), key());
    one.dial(&"nobody.example:5600".parse().unwrap(), None).unwrap();
    let ControlEvent::Down { why, .. } = next(&one) else { panic!() };
    assert!(why.to_string().contains("nobody.example has no address"), "{why}");
    let error = one.listen(&"nobody.example:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("nobody.example has no address"), "{error}");
}

/// Port 0 is whatever is free: nobody looks for what is wrong with it.
#[test]
fn an_address_that_is_not_this_hosts_is_named_without_port_0_and_its_cause_once() {
    let one = start(&resolver(), key());
    let error = one.listen(&"192.0.2.1:0".parse().unwrap()).unwrap_err();
    let said = error.in_full();
    assert!(said.contains("cannot listen at 192.0.2.1: "), "{said}");
    assert_eq!(said.matches("os error").count(), 1, "{said}");
    let error = one.listen(&"192.0.2.1:9".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1:9"), "{error}");
}

/// Or whoever answers for a name decides where plaintext goes.
#[test]
fn a_name_with_an_address_beyond_loopback_gets_no_plaintext() {
    let one = start(&resolver(), Security::plaintext_on_loopback());
    one.dial(&"lies.example:5600".parse().unwrap(), None).unwrap();
    let ControlEvent::Down { why, .. } = next(&one) else { panic!() };
    assert!(why.to_string().contains("plaintext beyond loopback"), "{why}");
    let error = one.listen(&"lies.example:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("at lies.example; "), "{error}");
}

#[test]
fn a_slow_resolver_holds_up_nobody() {
    let (one, other) = (start(&resolver(), key()), start(&resolver(), key()));
    let address = one.listen(&"six.example:0".parse().unwrap()).unwrap();
    let slow = format!("slow.example:{}", address.port()).parse().unwrap();
    let begun = Instant::now();
    let last = other.dial(&slow, None).unwrap();
    let first = other.dial(&address, None).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "it does not wait");
    assert!(matches!(next(&other), ControlEvent::Up { session, .. } if session == first));
    assert!(matches!(next(&other), ControlEvent::Up { session, .. } if session == last));
    assert!(begun.elapsed() >= Duration::from_millis(1500));
    // One that is closed while its name is looked up.
    let closed = other.dial(&slow, None).unwrap();
    other.close(closed);
    assert!(matches!(next(&other), ControlEvent::Down { session, .. } if session == closed));
    assert_eq!(other.stats().dialling, 0);
}
