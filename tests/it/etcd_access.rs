//! Who may reach a lock in etcd, and by what: TLS, certificates, user and password.
//!
//! Needs etcd, etcdctl and openssl.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Cluster, Run, Sandbox};

/// A certificate authority, and what it signed.
struct Authority<'s> {
    sandbox: &'s Sandbox,
    name: &'static str,
}

impl<'s> Authority<'s> {
    fn new(sandbox: &'s Sandbox, name: &'static str) -> Self {
        let authority = Authority { sandbox, name };
        let (key, cert) = (authority.key(name), authority.cert(name));
        let subject = format!("/CN={name}");
        openssl(&["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", &subject], &key, &cert, &[]);
        authority
    }

    fn key(&self, name: &str) -> PathBuf {
        self.sandbox.path(format!("{name}.key"))
    }

    fn cert(&self, name: &str) -> PathBuf {
        self.sandbox.path(format!("{name}.pem"))
    }

    /// A certificate for 127.0.0.1, good for servers and clients: etcd's gateway is a client of its own
    /// server.
    fn sign(&self, name: &str) {
        let extensions = self.sandbox.path(format!("{name}.ext"));
        std::fs::write(&extensions, "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
            .expect("extensions");
        let request = self.sandbox.path(format!("{name}.csr"));
        let subject = format!("/CN={name}");
        openssl(&["req", "-newkey", "rsa:2048", "-nodes", "-subj", &subject], &self.key(name), &request, &[]);
        let done = Command::new("openssl")
            .args(["x509", "-req", "-days", "2", "-CAcreateserial", "-in"])
            .arg(request)
            .arg("-CA")
            .arg(self.cert(self.name))
            .arg("-CAkey")
            .arg(self.key(self.name))
            .arg("-extfile")
            .arg(extensions)
            .arg("-out")
            .arg(self.cert(name))
            .output()
            .expect("openssl");
        assert!(done.status.success(), "{done:?}");
    }
}

fn openssl(args: &[&str], key: &Path, out: &Path, more: &[&str]) {
    let done = Command::new("openssl").args(args).arg("-keyout").arg(key).arg("-out").arg(out).args(more).output();
    let done = done.expect("openssl");
    assert!(done.status.success(), "{done:?}");
}

fn shown(path: PathBuf) -> String {
    path.display().to_string()
}

fn with_true(run: Run<'_>) -> Run<'_> {
    run.args(["--", "true"])
}

#[test]
fn over_tls_both_sides_show_certificates_and_a_wrong_one_is_69_at_once() {
    let files = Sandbox::in_memory();
    let (ours, other) = (Authority::new(&files, "ca"), Authority::new(&files, "other"));
    ours.sign("server");
    ours.sign("client");
    other.sign("stranger");
    let option = |name: &str, path: PathBuf| format!("--{name}={}", shown(path));
    let cluster = Cluster::start_with(
        1,
        "https",
        &[
            option("cert-file", ours.cert("server")),
            option("key-file", ours.key("server")),
            option("trusted-ca-file", ours.cert("ca")),
            "--client-cert-auth".into(),
        ],
    );
    let sandbox = Sandbox::new();
    let lock = cluster.lock("a");
    let run = |ca: PathBuf, cert: Option<(PathBuf, PathBuf)>| {
        let run = sandbox.withlock().args(["-q", "-w", "20s", &lock, "--etcd-cacert", &shown(ca)]);
        match cert {
            Some((cert, key)) => run.args(["--etcd-cert", &shown(cert), "--etcd-key", &shown(key)]),
            None => run,
        }
    };
    let client = || Some((ours.cert("client"), ours.key("client")));
    // What reaches the service reaches the command: `env` shows where the files are.
    let finished = run(ours.cert("ca"), client()).sh("env | grep ^WITHLOCK_ETCD_ | sort").run();
    finished.exited(0).silent();
    let expected = format!(
        "WITHLOCK_ETCD_CACERT={}\nWITHLOCK_ETCD_CERT={}\nWITHLOCK_ETCD_KEY={}\n",
        shown(ours.cert("ca")),
        shown(ours.cert("client")),
        shown(ours.key("client"))
    );
    assert_eq!(finished.out(), expected);
    // By the environment alone.
    let by_environment = sandbox
        .withlock()
        .env("WITHLOCK_ETCD_CACERT", ours.cert("ca"))
        .env("WITHLOCK_ETCD_CERT", ours.cert("client"))
        .env("WITHLOCK_ETCD_KEY", ours.key("client"))
        .arg(&lock);
    with_true(by_environment).run().exited(0).silent();
    let endpoint = cluster.endpoint(0);
    // A server that we have no reason to trust.
    let finished = with_true(run(other.cert("other"), client())).run();
    finished.exited(69).one_line(&[&format!("{lock}: cannot be reached: {endpoint}: TLS: "), "certificate"]);
    assert!(finished.took.as_secs() < 10, "waiting does not help: {:?}", finished.took);
    // A server that has no reason to trust us.
    let stranger = Some((other.cert("stranger"), other.key("stranger")));
    with_true(run(ours.cert("ca"), stranger)).arg("x").run().exited(69).one_line(&[endpoint]);
    with_true(run(ours.cert("ca"), None)).run().exited(69).one_line(&[endpoint]);
    // Plain text at a TLS port.
    with_true(sandbox.withlock().args(["-n", &lock.replacen("etcds", "etcd", 1)]))
        .run()
        .exited(69)
        .one_line(&[endpoint]);
    // Files that are not there, or not what they should be.
    let finished = with_true(run(files.path("nothing"), None)).run();
    finished.exited(69).one_line(&["/nothing: No such file or directory"]);
    with_true(run(ours.key("ca"), None)).run().exited(69).one_line(&["/ca.key: there is no certificate in it"]);
    let half = sandbox.withlock().args([lock.as_str(), "--etcd-cert", "x"]);
    with_true(half).run().exited(64);
    sandbox
        .withlock()
        .arg(lock)
        .env("WITHLOCK_ETCD_CERT", "x")
        .args(["--", "true"])
        .run()
        .exited(69)
        .one_line(&["a certificate and its key are needed"]);
}

#[test]
fn user_and_password_come_from_the_environment_or_a_file_and_what_they_may_not_is_77_at_once() {
    let (cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    for args in [
        &["user", "add", "root:secret-r"][..],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "cron:secret-c"],
        &["role", "add", "jobs"],
        &["role", "grant-permission", "jobs", "readwrite", "--prefix=true", "jobs/"],
        &["user", "grant-role", "cron", "jobs"],
        &["auth", "enable"],
    ] {
        // The role `root` exists from the beginning in some versions, and must be made in others.
        if args[0] == "user" && args[1] == "grant-role" && args[2] == "root" {
            let made = cluster.etcdctl(&sandbox, &[0]).args(["role", "add", "root"]).run();
            assert!(made.code() == Some(0) || made.err().contains("already exists"), "{made}");
        }
        cluster.ctl(args);
    }
    let run = |key: &str| sandbox.withlock().args(["-q", "-w", "20s", &cluster.lock(key)]);
    let endpoint = cluster.endpoint(0);

    with_true(run("jobs/a").env("WITHLOCK_ETCD_USER", "cron").env("WITHLOCK_ETCD_PASSWORD", "secret-c"))
        .run()
        .exited(0)
        .silent();
    std::fs::write(sandbox.path("credentials"), "cron:secret-c\n").expect("a file");
    let checked =
        run("jobs/a").args(["--etcd-credentials", "credentials"]).sh("cat \"$WITHLOCK_ETCD_CREDENTIALS\"").run();
    checked.exited(0).silent();
    assert_eq!(checked.out(), "cron:secret-c\n");
    for (what, finished) in [
        ("nobody", with_true(run("jobs/a")).run()),
        (
            "a wrong password",
            with_true(run("jobs/a").env("WITHLOCK_ETCD_USER", "cron").env("WITHLOCK_ETCD_PASSWORD", "x")).run(),
        ),
        (
            "another's key",
            with_true(run("other").env("WITHLOCK_ETCD_USER", "cron").env("WITHLOCK_ETCD_PASSWORD", "secret-c")).run(),
        ),
    ] {
        println!("{what}: {}", finished.err());
        finished.exited(77).one_line(&[": no permission: ", endpoint]);
        assert!(finished.took.as_secs() < 10, "{what}: waiting does not help");
        assert!(!finished.err().contains("secret"), "{what}");
    }
    std::fs::write(sandbox.path("credentials"), "cron\n").expect("a file");
    with_true(run("jobs/a").args(["--etcd-credentials", "credentials"]))
        .run()
        .exited(69)
        .one_line(&["credentials: it is not one line USER:PASSWORD"]);
    with_true(run("jobs/a").env("WITHLOCK_ETCD_USER", "cron")).run().exited(69).one_line(&["WITHLOCK_ETCD_PASSWORD"]);
}

#[test]
fn a_holder_whose_token_the_server_forgets_gets_another() {
    let (mut cluster, sandbox) = (Cluster::start(1), Sandbox::new());
    cluster.ctl(&["user", "add", "root:r"]);
    let made = cluster.etcdctl(&sandbox, &[0]).args(["role", "add", "root"]).run();
    assert!(made.code() == Some(0) || made.err().contains("already exists"), "{made}");
    for args in [&["user", "grant-role", "root", "root"][..], &["auth", "enable"]] {
        cluster.ctl(args);
    }
    let mut gate = sandbox.gate();
    let holder = sandbox
        .withlock()
        .env("WITHLOCK_ETCD_USER", "root")
        .env("WITHLOCK_ETCD_PASSWORD", "r")
        .args(["-q", "--ttl", "9s", &cluster.lock("a")])
        .sh(gate.script())
        .start();
    gate.wait_inside();
    // Tokens live in the server's memory.
    cluster.kill(0);
    cluster.restart(0);
    std::thread::sleep(std::time::Duration::from_secs(7));
    gate.open();
    let finished = holder.wait();
    finished.exited(0);
    assert!(!finished.err().contains("expires"), "{finished}");
}
